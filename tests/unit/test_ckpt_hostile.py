"""What searches through damaged checkpoints have found, and what nobody should be able to do, one test each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import write_folder, write_raw

from areno_fn.ckpt import hf
from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.paths import member, read_small
from areno_fn.ckpt.store import INDEX, SINGLE, open_store
from areno_fn.contracts.errors import CheckpointError

TENSORS = {name: torch.full((2, i + 1), float(i)) for i, name in enumerate("abcd")}


def refuse(call: Callable[[], Any], *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert "\n" not in text
    return text


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", TENSORS, shards=2)


def edit(folder: Path, **places: str) -> Path:
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"] |= places
    (folder / INDEX).write_text(json.dumps(values))
    return folder


# ------------------------------------------------------------------------------------------------------ the index


@pytest.mark.parametrize(
    "name",
    [
        "./x.safetensors",
        "x//y.safetensors",
        "x.safetensors/",
        "a\nb.safetensors",
        "a\u202eb.safetensors",
    ],
)
def test_names_that_are_not_plain(name: str, sharded: Path) -> None:
    refuse(lambda: open_store(edit(sharded, a=name)), f"the file name {name!r} must be a plain path inside the folder")


def test_a_name_that_no_file_can_have(sharded: Path) -> None:
    text = refuse(
        lambda: open_store(edit(sharded, a="n" * 300 + ".safetensors")), "(1 tensors); copy them into the folder"
    )
    assert len(text) < 2000
    refuse(lambda: open_store(edit(sharded, a="d/" * 5000 + "x.safetensors")), "(1 tensors)")


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.model", "model.bin", "MODEL.SAFETENSORS"])
def test_an_index_that_names_other_files(name: str, sharded: Path) -> None:
    (sharded / "tokenizer.model").write_text("x")
    refuse(lambda: open_store(edit(sharded, a=name)), f"{name!r} is not the name of a safetensors file")


def test_one_file_under_two_names(sharded: Path) -> None:
    (sharded / "again.safetensors").symlink_to(shard(1))
    refuse(
        lambda: open_store(edit(sharded, a="again.safetensors")),
        f"'a' should be in again.safetensors alone, it is in again.safetensors and {shard(1)}",
    )


def test_every_damaged_file_of_an_index_is_listed(sharded: Path) -> None:
    os.truncate(sharded / shard(1), 20)
    (sharded / shard(2)).unlink()
    os.mkfifo(sharded / "pipe.safetensors")
    edit(sharded, b="pipe.safetensors", c="../x", d="gone.safetensors")
    refuse(
        lambda: open_store(sharded),
        "names files that are not there: gone.safetensors (1 tensors)",
        f"{sharded / shard(1)} is truncated",
        "pipe.safetensors is not a regular file",
        "the file name '../x' must be a plain path",
    )


def test_of_a_thousand_offenders_twenty_are_shown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {f"t{i}": torch.ones(1) for i in range(1000)}, shards=2)
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"] = {name: shard(3 - int(file[6:11])) for name, file in values["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(values))
    text = refuse(lambda: open_store(folder), "and 980 more like the last")
    assert text.count(" alone, it is in ") == 20


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e400"])
def test_numbers_that_are_none(number: str, sharded: Path, tmp_path: Path) -> None:
    (sharded / INDEX).write_text(f'{{"metadata": {{"total_size": {number}}}, "weight_map": {{"a": "{shard(1)}"}}}}')
    refuse(lambda: open_store(sharded), "is not valid JSON")
    header = f'{{"a": {{"dtype": "U8", "shape": [{number}], "data_offsets": [0, 1]}}}}'.encode()
    refuse(lambda: read_header(write_raw(tmp_path / "m", header, b"\0")), "is not valid JSON")


def test_a_configuration_may_have_infinite_limits(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", TENSORS)
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert hf.open_folder(folder).config["time_step_limit"][1] == float("inf")


def test_half_of_a_surrogate_pair(sharded: Path) -> None:
    """A string that cannot be written again, nor shown."""
    refuse(lambda: strict_json(b'{"\\ud800": 1}', "it"), "it is not valid JSON", "surrogates not allowed")
    assert strict_json(b'{"\\ud83d\\ude00": 1}', "it") == {"\U0001f600": 1}


def test_names_that_stand_twice_are_found_in_no_time() -> None:
    names = ",".join(f'"n{i % 9_000}": 1' for i in range(9_999)).encode()
    assert len(refuse(lambda: strict_json(b"{" + names + b"}", "it"), "'n0'", "stands twice")) < 1000


# ---------------------------------------------------------------------------------------------------- the headers


@pytest.mark.parametrize("shape", [[2**62, 0, 2**62], [0, *[2**62] * 63], [0, 2**63 - 1]])
def test_an_empty_tensor_with_strides_beyond_64_bits(shape: list[int], tmp_path: Path) -> None:
    """Its bytes fit, but torch cannot make it."""
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    refuse(lambda: read_header(write_raw(tmp_path / "m", header)), "'a' has shape [", "which no tensor can have")


def test_what_is_absurdly_long_is_not_repeated(tmp_path: Path) -> None:
    for entry in (
        {"dtype": "X" * 100_000, "shape": [], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0] * 50_000, "data_offsets": [0, 0]},
    ):
        path = write_raw(tmp_path / "m", {"n" * 100_000: entry})
        assert len(refuse(lambda path=path: read_header(path), "... (100002 characters)")) < 2000


def test_a_file_with_a_hole_is_not_read_into_memory(tmp_path: Path) -> None:
    """A header of 100 MB that takes no room on the disk; without a brace at its beginning it is not read at all."""
    script = """
        import sys
        from pathlib import Path
        from areno_fn.ckpt.header import read_header
        from areno_fn.contracts.errors import CheckpointError

        def line(field):
            text = Path("/proc/self/status").read_text()
            return int(text.split(field)[1].split()[0]) / 1024

        before = line("VmRSS:")
        for path in sys.argv[1:]:
            try:
                read_header(Path(path))
            except CheckpointError as error:
                print(error)
        print(line("VmHWM:") - before)
    """
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, begin in zip(paths, (b"\0", b"{"), strict=True):
        path.write_bytes((100_000_000).to_bytes(8, "little") + begin)
        os.truncate(path, 1 << 40)
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    first, second, grown = done.stdout.splitlines()
    assert "must begin with" in first and "it holds NUL bytes" in second and float(grown) < 150


# ----------------------------------------------------------------------------------- what stands in place of a file


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device", "socket"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", SINGLE, INDEX, "tokenizer.json"])
def test_something_else_in_place_of_a_file(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for a writer, nothing reads without end. What is no file is not carried."""
    folder = write_folder(tmp_path / "a", TENSORS)
    if name == INDEX:
        (folder / SINGLE).unlink()
    monkeypatch.chdir(folder)  # a socket's path must be short
    put(kind, Path(name))
    if name == "tokenizer.json" and kind != "device":
        assert hf.open_folder(folder).path == folder
        return
    if name != "tokenizer.json":
        refuse(lambda: hf.open_folder(folder), str(folder))


def test_files_with_odd_names_beside_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number in range(30):
        (tmp_path / f"a\n{number:02d}.bin").write_text("")
    refuse(lambda: hf.open_folder(tmp_path), "has weights only as 'a\\n00.bin', ", " and 10 more; only safetensors")


def test_a_folder_that_must_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def forbidden(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    refuse(lambda: hf.open_folder(tmp_path), f"{tmp_path} cannot be opened (Permission denied)")


def test_reading_small_files_of_other_kinds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuse(lambda: read_small(tmp_path / "pipe"), "is not a regular file")
    refuse(lambda: read_small(tmp_path), "is not a regular file")


def test_a_link_within_a_link_that_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "x").mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (folder / "x" / "up").symlink_to("../..")
    (folder / "y").symlink_to("x/up/secret")
    refuse(lambda: member(folder, "y"), "is a link to", "outside the folder")
    refuse(lambda: member(folder, "x/up/secret"), "outside the folder")


def test_a_folder_whose_name_begins_like_this_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "f").write_text("s")
    (tmp_path / "a" / "f").symlink_to("../ab/f")
    refuse(lambda: member(tmp_path / "a", "f"), "outside the folder")
