"""Reading by several threads in pieces, and writing: the same bits however it is cut, and no more memory than is said."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import random_bits, read_files, same_bits, write_folder, write_raw

from areno_fn.ckpt import hf, outbound, ring, stream
from areno_fn.ckpt.host import memory, passing
from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import (
    Iso,
    TensorSpec,
    concat,
    identity,
    interleave,
    pad,
    rename,
    stack,
    tie,
    transpose,
)

CONFIG = {"model_type": "toy"}


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape)


def moves() -> Iso:
    """Leaves that are views of one kind or another, and leaves that are not."""
    return (
        rename("plain", "plain", spec(5, 7))
        | rename("scalar", "scalar", spec())
        | rename("nothing", "nothing", spec(0, 3))
        | concat({"q": spec(6, 4), "k": spec(3, 4)}, "qk")
        | concat({"left": spec(9, 2), "right": spec(9, 3)}, "beside", dim=1)
        | stack(["e0", "e1", "e2"], "experts", spec(4, 5), dim=1)
        | transpose("turned", "turned", spec(8, 3))
        | interleave({"gate": spec(6, 2), "up": spec(6, 2)}, "gate_up", blocks=3)
        | tie("tied", ["tied.a", "tied.b"], spec(7, 3))
        | pad("vocabulary", "padded", spec(5, 3), 8)
    )


def tensors(iso: Iso, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: random_bits(s.shape, dtype, generator) for name, s in iso.source.items()}
    if "tied.a" in made:
        made["tied.b"] = made["tied.a"].clone()
    return made


def cut_into(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    for module in (stream, ring, outbound):
        patch.setattr(module, "PIECE", nbytes)


# ----------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("piece", [4, 6, 10, 64, 1 << 23])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shards", [1, 4])
def test_pieces_of_any_size_make_the_same_leaves(
    piece: int, threads: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iso = moves()
    given = tensors(iso)
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG, shards=shards))
    cut_into(monkeypatch, piece)
    loaded = hf.load(folder, iso, threads=threads)
    assert same_bits(loaded, iso(given))
    out = hf.save(tmp_path / "b", loaded, iso, CONFIG, source=folder, threads=threads, shard_bytes=150)
    assert same_bits(read_files(out)[0], given)


@pytest.mark.parametrize("piece", [8, 1 << 23])
def test_pieces_that_are_converted(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iso = moves()
    given = {name: torch.randn(s.shape).to(torch.float16) for name, s in iso.source.items()}
    given["tied.b"] = given["tied.a"].clone()
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG))
    cut_into(monkeypatch, piece)
    wide = hf.load(folder, iso, dtype="float32", threads=2)
    assert same_bits(wide, iso({name: tensor.float() for name, tensor in given.items()}))
    out = hf.save(tmp_path / "b", wide, iso, CONFIG, source=folder)
    assert same_bits(read_files(out)[0], given)


def test_memory_that_passes(tmp_path: Path) -> None:
    """From 1 MB on the memory is mapped for the tensor alone; it is an ordinary tensor otherwise."""
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        large = passing((1025, 1024), dtype, torch.device("cpu"))
        assert large.is_contiguous() and large.dtype is dtype and large.data_ptr() % 4096 == 0
        assert len(memory(large)) == large.nbytes == 1025 * 1024 * dtype.itemsize
        large.copy_(torch.ones(1025, 1024))
        assert large.clone().float().sum().item() == 1025 * 1024
    small = passing((3,), torch.int64, torch.device("cpu"))
    assert small.shape == (3,) and passing((1 << 21, 0), torch.uint8, torch.device("cpu")).numel() == 0


def test_what_stands_together_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors it is, and however little the system gives at a time."""
    iso = identity({f"t{i:04d}": spec(i % 4, 3) for i in range(1500)})
    given = tensors(iso)
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG))
    real, calls = os.preadv, []

    def preadv(descriptor: int, views: list[memoryview], place: int) -> int:
        calls.append(len(views))
        return real(descriptor, views, place)

    monkeypatch.setattr("areno_fn.ckpt.tensorfile.os.preadv", preadv)
    assert same_bits(hf.load(folder, iso), given) and sum(calls) == 1500 * 3 // 4 and len(calls) == 3

    def little(descriptor: int, views: list[memoryview], place: int) -> int:
        return real(descriptor, [views[0][:5]], place)

    monkeypatch.setattr("areno_fn.ckpt.tensorfile.os.preadv", little)
    assert same_bits(hf.load(folder, iso), given)


def test_tensors_of_several_sizes_of_elements_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three bytes before numbers of eight: in the buffer those would not begin where such a number can."""
    iso = identity({"a": spec(3), "b": spec(5)})
    given = {"a": torch.tensor([1, 2, 3], dtype=torch.uint8), "b": torch.randn(5).double()}
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [5], "data_offsets": [3, 43]},
    }
    path = write_folder(tmp_path / "a", given, CONFIG)
    write_raw(path / SINGLE, header, bytes(memory(given["a"])) + bytes(memory(given["b"])))
    folder = hf.open_folder(path)
    assert same_bits(hf.load(folder, iso), given)
    monkeypatch.setattr(stream._Piece, "is_direct", property(lambda self: False))
    assert same_bits(hf.load(folder, iso), given)
    assert hf.load(folder, iso, dtype="float32")["b"].dtype is torch.float32


# --------------------------------------------------------------------------------------------------------- errors


def test_the_first_piece_that_fails_is_the_one_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the threads do, the same sentence."""
    names = [f"t{i:02d}" for i in range(24)]
    iso = identity(dict.fromkeys(names, spec(64)))
    cut_into(monkeypatch, 64 * 2)
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors(iso), CONFIG))
    starts = sorted(folder.store.entry(name).start for name in names)
    real = stream.fill

    def fill(descriptor: int, header: Any, start: int, *views: memoryview) -> None:
        if start in starts[7:]:
            raise CheckpointError(f"no byte {start}")
        real(descriptor, header, start, *views)

    monkeypatch.setattr(stream, "fill", fill)
    for _ in range(20):
        with pytest.raises(CheckpointError, match=f"no byte {starts[7]}$"):
            hf.load(folder, iso, threads=6)


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    iso = identity({"a": spec(8), "b": spec(8)})
    path = write_folder(tmp_path / "a", tensors(iso), CONFIG)
    folder = hf.open_folder(path)
    os.truncate(path / SINGLE, folder.store.entry("b").start + 3)
    with pytest.raises(CheckpointError, match="bytes when its header was read, now it has"):
        hf.load(folder, iso)
    (path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        hf.load(folder, iso)


def test_a_disk_that_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iso = identity({"a": spec(8)})
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors(iso), CONFIG))

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("areno_fn.ckpt.tensorfile.os.preadv", fail)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read \(Input/output error\)"):
        hf.load(folder, iso)


def test_a_listener_that_raises_ends_the_load(tmp_path: Path) -> None:
    iso = moves()
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors(iso), CONFIG))

    def stop(done: int, *_: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.load(folder, iso, progress=stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_that_are_none(threads: int, tmp_path: Path) -> None:
    iso = identity({"a": spec(8)})
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors(iso), CONFIG))
    with pytest.raises(CheckpointError, match=f"threads must be at least 1, received {threads}"):
        hf.load(folder, iso, threads=threads)
    with pytest.raises(CheckpointError, match=f"threads must be at least 1, received {threads}"):
        hf.save(tmp_path / "b", tensors(iso), iso, CONFIG, threads=threads)
    assert not (tmp_path / "b").exists()


# --------------------------------------------------------------------------------------------- what it takes


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    iso = identity({f"t{i:03d}": spec(4) for i in range(120)})
    given = tensors(iso)
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG, shards=120))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    try:
        assert same_bits(hf.load(folder, iso), given)
        out = hf.save(tmp_path / "b", given, iso, CONFIG, source=folder, shard_bytes=8, threads=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(out.glob("*.safetensors"))) == 120 and (out / INDEX).exists()
    assert len(os.listdir("/proc/self/fd")) <= used + 1


MEMORY = """
    import sys
    from pathlib import Path
    import torch
    from areno_fn.ckpt import hf
    from areno_fn.contracts.layout import TensorSpec, concat, identity, tie

    def line(field):
        return int(Path("/proc/self/status").read_text().split(field)[1].split()[0]) // 1024

    def peak(call):
        Path("/proc/self/clear_refs").write_text("5")
        before = line("VmRSS:")
        result = call()
        print(line("VmHWM:") - before)
        return result

    half = TensorSpec((8 << 20,), torch.bfloat16)  # 16 MB
    iso = concat({"a": half, "b": half}, "ab") | identity({f"t{i}": half for i in range(6)})
    wide = identity({name: TensorSpec((8 << 20,)) for name in iso.source})
    root = Path(sys.argv[1])
    zeros = {name: torch.ones(8 << 20, dtype=torch.bfloat16) for name in iso.source}
    hf.save(root / "warm", {"x": torch.ones(1)}, identity({"x": TensorSpec((1,))}), {})
    peak(lambda: hf.save(root / "a", zeros, wide, {}, shard_bytes=40_000_000, threads=1))
    del zeros
    folder = hf.open_folder(root / "a")
    hf.load(hf.open_folder(root / "warm"), identity({"x": TensorSpec((1,))}))
    leaves = peak(lambda: hf.load(folder, wide, dtype="float32", threads=2))
    peak(lambda: hf.save(root / "b", leaves, wide, {}, source=folder, shard_bytes=40_000_000, threads=1))
"""


def test_memory_is_the_leaves_and_a_buffer(tmp_path: Path) -> None:
    """Eight tensors of 16 MB: written as they are nothing is added; loaded as float32, 256 MB of leaves and four
    buffers of 8 MB; written back as bfloat16, one tensor."""
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    saved, loaded, converted = map(int, done.stdout.split())
    assert saved <= 12 and 256 <= loaded <= 256 + 32 + 24 and converted <= 16 + 14
