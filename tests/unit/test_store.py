"""Files of weights: every way in which a header, an index or a path can lie is refused by a sentence."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ckpt_toys import same_bits, write_folder, write_raw

from areno_fn.ckpt.header import DTYPES, read_header
from areno_fn.ckpt.paths import member, read_small
from areno_fn.ckpt.ring import Ring
from areno_fn.ckpt.store import INDEX, SINGLE, open_store
from areno_fn.ckpt.stream import Wanted, stream
from areno_fn.ckpt.tensorfile import Reader, write_tensors
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec, spec_of


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for word in words:
        assert word in message


def read_all(path: Path) -> dict[str, torch.Tensor]:
    header = read_header(path)
    with Reader() as reader:
        return {name: reader.read(header, name) for name in header.entries}


# ------------------------------------------------------------------------------------------------ headers

BAD_HEADERS: dict[str, tuple[Any, int, str]] = {
    "gap at the start": ({"a": entry(1, 3)}, 3, "'a' begins at byte 1 of the data and leaves a gap after the header"),
    "gap": ({"a": entry(0, 2), "b": entry(3, 4)}, 4, "'b' begins at byte 3 of the data and leaves a gap after 'a'"),
    "overlap": ({"a": entry(0, 3), "b": entry(2, 4)}, 4, "begins at byte 2 of the data and overlaps 'a', which ends at 3"),
    "two tensors in one place": ({"a": entry(0, 2), "b": entry(0, 2)}, 2, "'b' begins at byte 0 of the data and overlaps 'a'"),
    "backwards": ({"a": entry(2, 0, [0])}, 2, "data_offsets [2, 0], a start and an end are needed"),
    "negative": ({"a": entry(-2, 0)}, 0, "data_offsets [-2, 0]"),
    "one offset": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, 1, "data_offsets [0]"),
    "floating offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, 1, "data_offsets [0, 1.0]"),
    "too few bytes": ({"a": entry(0, 2, [3])}, 2, "is uint8 [3] and needs 3 bytes, but its offsets give it 2"),
    "size of the dtype": ({"a": entry(0, 4, [2], "F32")}, 4, "is float32 [2] and needs 8 bytes, but its offsets give it 4"),
    "a product that overflows": ({"a": entry(0, 0, [1 << 62, 1 << 62], "F64")}, 0, "but its offsets give it 0"),
    "a size beyond 63 bits": ({"a": entry(0, 0, [0, 1 << 64])}, 0, "has shape [0, 18446744073709551616]"),
    "a negative size": ({"a": entry(0, 1, [-1])}, 1, "has shape [-1]"),
    "a bool as a size": ({"a": entry(0, 1, [True])}, 1, "has shape [True]"),
    "too many dimensions": ({"a": entry(0, 1, [1] * 65)}, 1, "a list of at most 64 sizes is needed"),
    "unknown dtype": ({"a": entry(0, 1, [1], "F4")}, 1, "tensor 'a' has dtype 'F4', known are BOOL, U8"),
    "dtype of another type": ({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, 1, "has dtype ['U8']"),
    "missing field": ({"a": {"dtype": "U8", "shape": [1]}}, 1, "must have exactly dtype, shape and data_offsets"),
    "unknown field": ({"a": {**entry(0, 1), "stride": [1]}}, 1, "must have exactly dtype, shape and data_offsets"),
    "not an object": ({"a": [0, 1]}, 1, "must have exactly dtype, shape and data_offsets"),
    "metadata of numbers": ({"__metadata__": {"step": 3}}, 0, "__metadata__ must map strings to strings"),
    "metadata null": ({"__metadata__": None}, 0, "__metadata__ must map strings to strings"),
    "a list": ([1, 2], 0, "must begin with '{', it begins with b'['"),
    "not JSON": (b"{'a': 1}", 0, "is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "is not valid JSON"),
    "one name twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', 1, "'a' stands twice in one object"),
    "a field twice": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1, "'dtype' stands twice"),
    "nested without end": (b'{"a":' + b"[" * 200_000, 0, "is nested too deeply"),
    "a number without end": (b'{"a":' + b"9" * 5000 + b"}", 0, "is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    header, size, words = BAD_HEADERS[name]
    refuse(write_raw(tmp_path / "m.safetensors", header, b"\0" * size), words)


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5)}, path)
    return path


def test_K13_a_file_that_lost_its_last_byte(valid: Path) -> None:
    whole = valid.read_bytes()
    valid.write_bytes(whole[:-1])
    refuse(valid, f"is truncated: expected {len(whole)} bytes by its header, it has {len(whole) - 1}")


def test_K13_a_file_with_one_byte_more(valid: Path) -> None:
    whole = valid.read_bytes()
    valid.write_bytes(whole + b"\0")
    refuse(valid, f"is over-long: expected {len(whole)} bytes by its header, it has {len(whole) + 1}")


def test_K13_a_header_length_beyond_the_file(valid: Path) -> None:
    whole = valid.read_bytes()
    valid.write_bytes((len(whole) - 7).to_bytes(8, "little") + whole[8:])
    refuse(
        valid, f"is truncated: its header needs {len(whole) + 1} bytes, expected at least that, but it has {len(whole)}"
    )


def test_K13_an_absurd_header_length_is_refused_without_reading_it(valid: Path) -> None:
    whole = valid.read_bytes()
    for length in (132_095_296, 2**64 - 1):
        valid.write_bytes(length.to_bytes(8, "little") + whole[8:])
        refuse(valid, f"declares a header of {length} bytes, at most 100000000 are allowed")


@pytest.mark.parametrize("size", range(8))
def test_K13_a_file_without_room_for_a_header(size: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x02" * size)
    refuse(path, f"has {size} bytes, expected at least 8")


def test_K13_every_truncation_is_refused(valid: Path) -> None:
    whole = valid.read_bytes()
    for size in range(len(whole)):
        valid.write_bytes(whole[:size])
        refuse(valid)


def test_K13_a_file_that_shrinks_while_it_is_read(valid: Path) -> None:
    header = read_header(valid)
    whole = valid.read_bytes()
    with Reader() as reader:
        valid.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=f"had {len(whole)} bytes when its header was read, now it has"):
            reader.read(header, "b")
    valid.write_bytes(whole)
    with Reader() as reader:
        reader.read(header, "a")
        os.truncate(valid, header.entries["b"].start + 4)
        with pytest.raises(CheckpointError, match="was cut short while it was read"):
            reader.read(header, "b")


def test_K10_empty_metadata_is_metadata(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"__metadata__": {}, "a": entry(0, 2)}, b"\1\2")
    header = read_header(path)
    assert dict(header.metadata) == {} and list(header.entries) == ["a"]


def test_a_file_without_metadata_or_tensors(tmp_path: Path) -> None:
    header = read_header(write_raw(tmp_path / "m.safetensors", {}))
    assert (dict(header.metadata), dict(header.entries), header.data) == ({}, {}, 10)


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(0, 3), "b": torch.tensor(2.5), "c": torch.zeros(2, 0)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    assert same_bits(read_all(tmp_path / "m.safetensors"), tensors)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    refuse(tmp_path / "m.safetensors", "is not a regular file")
    refuse(tmp_path, "is not a regular file")
    refuse(tmp_path / "none", "cannot be read (No such file or directory)")


# ------------------------------------------------------------------------------------- reading and writing


def every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=generator)
    made = {name: random.clone().view(dtype).reshape(2, -1) for name, dtype in DTYPES.items() if name != "BOOL"}
    return {**made, "BOOL": random > 127}


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> int:
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    return write_tensors(path, specs, tensors.__getitem__, metadata or {"format": "pt"})


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(every_dtype(), tmp_path / "m.safetensors")
    assert same_bits(read_all(tmp_path / "m.safetensors"), every_dtype())


def test_what_is_written_is_what_the_library_writes(tmp_path: Path) -> None:
    some = {name: tensor for name, tensor in every_dtype().items() if name in ("F32", "BF16", "I64", "U8")}
    tensors = some | {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "größe": torch.ones(3)}
    size = write(tmp_path / "ours", tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert size == (tmp_path / "ours").stat().st_size


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", every_dtype())
    assert same_bits(safetensors.torch.load_file(tmp_path / "m.safetensors"), every_dtype())


def test_K15_strides_do_not_reach_the_file(tmp_path: Path) -> None:
    turned = torch.arange(6).view(2, 3).t()
    others = {"turned": turned, "every other": torch.arange(8)[::2], "spread": torch.ones(1).expand(3)}
    write(tmp_path / "m.safetensors", others)
    back = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert back["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back["every other"].tolist() == [0, 2, 4, 6] and back["spread"].tolist() == [1, 1, 1]


def test_a_tensor_of_one_element_with_a_stride(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {"a": torch.arange(6.0).reshape(2, 3)[:1, 1]})
    assert read_all(tmp_path / "m.safetensors")["a"].tolist() == [1.0]


def test_a_tensor_is_fetched_when_its_turn_comes(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.ones(2), "c": torch.ones(2, dtype=torch.float64)}
    asked: list[str] = []

    def fetch(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    write_tensors(tmp_path / "m", {name: spec_of(t) for name, t in tensors.items()}, fetch, {})
    assert asked == ["c", "a", "b"]


def test_tensors_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=re.escape("'a' has dtype torch.complex64, which a safetensors file cannot hold")
    ):
        write(tmp_path / "1", {"a": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(
        CheckpointError, match=re.escape("'a' was to be written as float32 [2], but it is float32 [2] on meta")
    ):
        write(tmp_path / "2", {"a": torch.ones(2, device="meta")})
    with pytest.raises(
        CheckpointError, match=re.escape("'a' was to be written as float32 [3], but it is float32 [2] on cpu")
    ):
        write_tensors(tmp_path / "3", {"a": TensorSpec((3,), torch.float32)}, lambda _: torch.ones(2), {})


def test_reading_into_converts_and_follows_strides(tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)})
    header = read_header(tmp_path / "m")
    out = torch.zeros(3, 2)
    assert list(stream([Wanted(header, "a", out.t())], Ring(torch.device("cpu"), 1), 1)) == ["a"]
    assert out.tolist() == [[0, 3], [1, 4], [2, 5]]


# -------------------------------------------------------------------------------------------------- folders

TENSORS = {name: torch.full((2, i + 1), float(i)) for i, name in enumerate("abcdef")}


def edit_index(folder: Path, **changes: str | None) -> Path:
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"] = {k: v for k, v in (values["weight_map"] | changes).items() if v is not None}
    (folder / INDEX).write_text(json.dumps(values))
    return folder


def refuse_folder(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_store(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", TENSORS, shards=3)


def test_single_and_sharded_folders_say_the_same(tmp_path: Path, sharded: Path) -> None:
    single = open_store(write_folder(tmp_path / "single", TENSORS))
    several = open_store(sharded)
    assert single.specs == several.specs == {name: spec_of(t) for name, t in TENSORS.items()}
    assert single.index_metadata is None and several.index_metadata == {"total_size": 168}


def test_K7_missing_shards_are_all_listed(sharded: Path) -> None:
    (sharded / shard(2)).unlink()
    (sharded / shard(3)).unlink()
    refuse_folder(sharded, "names files that are not there", f"{shard(2)}, {shard(3)} (4 tensors)")


def test_every_disagreement_of_an_index_is_listed(sharded: Path) -> None:
    extra = {**{name: TENSORS[name] for name in "be"}, "a": TENSORS["a"], "loose": torch.ones(1)}
    safetensors.torch.save_file(extra, sharded / shard(2))
    edit_index(sharded, ghost=shard(1), c=shard(1))
    refuse_folder(
        sharded,
        f"'ghost' should be in {shard(1)}, it is in none",
        f"'c' should be in {shard(1)} alone, it is in {shard(3)}",
        f"'a' should be in {shard(1)} alone, it is in {shard(1)} and {shard(2)}",
        f"'loose' in {shard(2)} is not in the index",
    )


def test_K7_a_tensor_without_an_entry(sharded: Path) -> None:
    refuse_folder(edit_index(sharded, e=None), f"'e' in {shard(2)} is not in the index")


def test_K13_a_truncated_shard_is_named(sharded: Path) -> None:
    size = (sharded / shard(3)).stat().st_size
    os.truncate(sharded / shard(3), size - 1)
    refuse_folder(sharded, f"{sharded / shard(3)} is truncated: expected {size} bytes by its header, it has {size - 1}")


def test_a_tensor_twice_in_the_index(sharded: Path) -> None:
    text = (sharded / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"a": "{shard(2)}", ')
    (sharded / INDEX).write_text(text)
    refuse_folder(sharded, "'a' stands twice in one object")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "needs a weight_map from tensor names to file names"),
        ("{}", "needs a weight_map"),
        ('{"weight_map": {}}', "needs a weight_map"),
        ('{"weight_map": {"a": 1}}', "needs a weight_map"),
        ('{"weight_map": {"a": "b"}, "metadata": 3}', "metadata must be an object, received 3"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_an_index_that_is_none(text: str, words: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    refuse_folder(sharded, str(sharded / INDEX), words)


def test_two_sets_of_weights(sharded: Path) -> None:
    write_folder(sharded, TENSORS)
    refuse_folder(sharded, f"holds both {SINGLE} and {INDEX}")


def test_no_weights(tmp_path: Path) -> None:
    refuse_folder(tmp_path, f"has no weights: neither {SINGLE} nor {INDEX}")
    safetensors.torch.save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    refuse_folder(tmp_path, f"has adapter_model.safetensors, but neither {SINGLE} nor {INDEX}")
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    other = "diffusion_pytorch_model.safetensors"
    refuse_folder(tmp_path, f"has adapter_model.safetensors, but neither {other} nor {other}.index.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "diffusion_pytorch_model-00001-of-00002.safetensors")
    refuse_folder(tmp_path, f"but neither {other} nor {other}.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse_folder(tmp_path, "has weights only as pytorch_model.bin; only safetensors are read, so convert them first")


# -------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret", "sub/../../secret", "..", "", ".", "a\0b", "..\\secret", "C:\\secret", "a/.."]
)
def test_names_that_leave_the_folder(name: str, sharded: Path) -> None:
    (sharded.parent / "secret").write_text("x")
    refuse_folder(edit_index(sharded, a=name), f"the file name {name!r} must be a plain path inside the folder")


def test_links_that_leave_the_folder(sharded: Path) -> None:
    outside = sharded.parent / "outside.safetensors"
    (sharded / shard(1)).rename(outside)
    (sharded / shard(1)).symlink_to(outside)
    refuse_folder(sharded, f"{shard(1)!r} is a link to {outside}, outside the folder; put the file itself there")


def test_a_folder_that_is_a_link_out(sharded: Path) -> None:
    (sharded.parent / "elsewhere").mkdir()
    (sharded / shard(1)).rename(sharded.parent / "elsewhere" / "w.safetensors")
    (sharded / "sub").symlink_to(sharded.parent / "elsewhere")
    refuse_folder(edit_index(sharded, a="sub/w.safetensors", d="sub/w.safetensors"), "outside the folder")


def test_links_inside_the_folder_are_followed(sharded: Path) -> None:
    (sharded / shard(1)).rename(sharded / "first")
    (sharded / shard(1)).symlink_to("first")
    assert set(open_store(sharded).places) == set(TENSORS)


def test_a_link_to_itself(sharded: Path) -> None:
    (sharded / shard(1)).unlink()
    (sharded / shard(1)).symlink_to(shard(1))
    refuse_folder(sharded, "names files that are not there")


def test_a_snapshot_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    """There the files are links into `blobs`, which is not inside the folder."""
    snapshot = write_folder(tmp_path / "models--x--y" / "snapshots" / "abc", TENSORS)
    blobs = tmp_path / "models--x--y" / "blobs"
    blobs.mkdir()
    (snapshot / SINGLE).rename(blobs / "1f")
    (snapshot / SINGLE).symlink_to("../../blobs/1f")
    assert set(open_store(snapshot).places) == set(TENSORS)
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to("../../../secret.safetensors")
    safetensors.torch.save_file(TENSORS, tmp_path / "secret.safetensors")
    refuse_folder(snapshot, "outside the folder")


def test_small_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(member(tmp_path, "a"), 5) == b"12345"
    with pytest.raises(CheckpointError, match="is longer than 4 bytes"):
        read_small(tmp_path / "a", 4)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_small(tmp_path / "b")
