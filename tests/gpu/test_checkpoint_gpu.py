"""Checkpoints on a CUDA device: the same bits as on the CPU, whatever the pieces, streams and threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_toys import random_bits, read_files, same_bits, write_folder

from areno_fn.ckpt import hf, outbound, ring, stream
from areno_fn.contracts.layout import Iso, TensorSpec, concat, interleave, pad, rename, stack, tie, transpose

pytestmark = pytest.mark.gpu

CONFIG = {"model_type": "toy"}


def moves() -> Iso:
    """Leaves of several megabytes that are views of one kind or another, and leaves that are not."""
    return (
        rename("plain", "plain", TensorSpec((1000, 1500)))
        | rename("scalar", "scalar", TensorSpec(()))
        | rename("nothing", "nothing", TensorSpec((0, 3)))
        | concat({"q": TensorSpec((600, 700)), "k": TensorSpec((300, 700))}, "qk")
        | concat({"left": TensorSpec((900, 200)), "right": TensorSpec((900, 300))}, "beside", dim=1)
        | stack([f"e{i}" for i in range(5)], "experts", TensorSpec((400, 300)), dim=1)
        | transpose("turned", "turned", TensorSpec((800, 900)))
        | interleave({"gate": TensorSpec((600, 500)), "up": TensorSpec((600, 500))}, "gate_up", blocks=3)
        | tie("tied", ["tied.a", "tied.b"], TensorSpec((700, 300)))
        | pad("vocabulary", "padded", TensorSpec((500, 300)), 512)
    )


def tensors(dtype: torch.dtype, finite: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(spec.shape, generator=generator).to(dtype)
        if finite
        else random_bits(spec.shape, dtype, generator)
        for name, spec in moves().source.items()
    }
    made["tied.b"] = made["tied.a"].clone()
    return made


@pytest.mark.parametrize("piece", [1 << 16, 1 << 20, ring.PIECE])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("shards", [1, 4])
def test_bits_go_to_the_device_and_back(
    piece: int, threads: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stream, ring, outbound):
        monkeypatch.setattr(module, "PIECE", piece)
    iso, given = moves(), tensors(torch.bfloat16)
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG, shards=shards))
    loaded = hf.load(folder, iso, device="cuda", threads=threads)
    assert {leaf.device.type for leaf in loaded.values()} == {"cuda"}
    assert same_bits({name: leaf.cpu() for name, leaf in loaded.items()}, iso(given))
    out = hf.save(tmp_path / "b", loaded, iso, CONFIG, source=folder, threads=threads, shard_bytes=2_000_000)
    assert same_bits(read_files(out)[0], given)


def test_conversions_on_the_device(tmp_path: Path) -> None:
    iso, given = moves(), tensors(torch.bfloat16, finite=True)
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG))
    wide = hf.load(folder, iso, device="cuda", dtype="float32")
    assert same_bits({n: leaf.cpu() for n, leaf in wide.items()}, iso({n: t.float() for n, t in given.items()}))
    out = hf.save(tmp_path / "b", wide, iso, CONFIG, source=folder)
    assert same_bits(read_files(out)[0], given)


def test_what_was_asked_of_the_device_before_is_written(tmp_path: Path) -> None:
    """The kernels that make the parameters may still run, on a stream of their own, when saving begins."""
    iso = rename("w", "w", TensorSpec((4096, 4096)))
    side = torch.cuda.Stream()
    for number in range(5):
        with torch.cuda.stream(side):
            w = torch.full((4096, 4096), 1.0, device="cuda")
            for _ in range(30):
                w = w @ w / 4096
            out = hf.save(tmp_path / f"{number}", {"w": w}, iso, CONFIG)
        assert bool((read_files(out)[0]["w"] == 1.0).all())


def test_memory_that_is_used_again_is_filled_after_its_last_use(tmp_path: Path) -> None:
    """The allocator may give the loader memory that a kernel which has been asked for still writes."""
    iso, generator = rename("w", "w", TensorSpec((4096, 4096))), torch.Generator().manual_seed(0)
    given = {"w": random_bits((4096, 4096), torch.float32, generator)}
    folder = hf.open_folder(write_folder(tmp_path / "a", given, CONFIG))
    for _ in range(5):
        busy = torch.ones(4096, 4096, device="cuda")
        for _ in range(30):
            busy = busy @ busy / 4096
        del busy
        assert same_bits({"w": hf.load(folder, iso, device="cuda")["w"].cpu()}, given)
