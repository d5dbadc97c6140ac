"""What `checkpoint.py` measures: the checkpoint, and the ways of reading and writing it that are compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch

from areno_fn.ckpt import hf
from areno_fn.contracts.layout import Iso
from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.qwen3 import checkpoint as qwen3

QWEN3_06B = DecoderConfig(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
    head_dim=128, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
_BLOCK = 1 << 23
FILE = "model.safetensors"


def layout() -> Iso:
    """The fused layout of Qwen3-0.6B: q, k and v are one leaf, gate and up another."""
    return qwen3.layout(QWEN3_06B, head_in_file=False)


def make(folder: Path) -> Path:
    """A folder with 1.19 GB of random bits in bf16, in one file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-32768, 32768, spec.shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
        for name, spec in layout().source.items()
    }
    safetensors.torch.save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def drop(path: Path) -> None:
    """Takes a file out of the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def sync(path: Path) -> None:
    """Returns when a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def resident(leaves: dict[str, torch.Tensor]) -> None:
    """Touches every page, so that what is merely mapped is read."""
    for leaf in leaves.values():
        if leaf.is_cuda:
            torch.cuda.synchronize(leaf.device)
            return
        int(leaf.view(-1).view(torch.uint8)[::4096].sum())


def load_ours(path: Path, device: str, threads: int) -> Callable[[], None]:
    iso, folder = layout(), hf.open_folder(path.parent)
    return lambda: resident(hf.load(folder, iso, device=device, threads=threads))


def load_library(path: Path, device: str, threads: int) -> Callable[[], None]:
    """`load_file`, then `torch.cat` as the layout says; what is not joined stays a view of the mapped file."""
    iso = layout()
    return lambda: resident(iso(safetensors.torch.load_file(path, device=device)))


def load_library_owned(path: Path, device: str, threads: int) -> Callable[[], None]:
    """The same, with leaves that do not change with the file."""
    iso = layout()

    def load() -> None:
        loaded = iso(safetensors.torch.load_file(path, device=device))
        resident({name: leaf.clone() if len(iso.sources_of(name)) == 1 else leaf for name, leaf in loaded.items()})

    return load


LOADS = {"ours": load_ours, "library": load_library, "library, owned": load_library_owned}


def read_raw(path: Path, threads: int, pinned: bool) -> Callable[[], None]:
    """The whole file with big reads, each thread an equal share of it into one buffer."""
    size = path.stat().st_size
    share = -(-size // threads)
    buffers = [torch.zeros(_BLOCK, dtype=torch.uint8, pin_memory=pinned) for _ in range(threads)]

    def part(number: int) -> None:
        descriptor, view = os.open(path, os.O_RDONLY), buffers[number].numpy().data
        place, stop = number * share, min((number + 1) * share, size)
        while place < stop:
            place += os.preadv(descriptor, [view[: stop - place]], place)
        os.close(descriptor)

    def read() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))

    return read


def save_ours(out: Path, leaves: dict[str, torch.Tensor], iso: Iso, folder: hf.HFFolder) -> Callable[[], None]:
    return lambda: hf.save(out, leaves, iso, {}, source=folder) and None


def save_library(out: Path, leaves: dict[str, torch.Tensor], iso: Iso, synced: bool) -> Callable[[], None]:
    """The leaves split as the layout says, then `save_file`, which does not wait for the disk itself."""

    def save() -> None:
        out.mkdir(exist_ok=True)
        split = {name: tensor.contiguous() for name, tensor in iso.inverse(leaves).items()}
        safetensors.torch.save_file(split, out / "model.safetensors", metadata={"format": "pt"})
        if synced:
            sync(out / "model.safetensors")

    return save


def write_raw(out: Path, count: int, synced: bool) -> Callable[[], None]:
    """As many bytes with big writes from one buffer."""
    block = memoryview(bytes(_BLOCK))

    def write() -> None:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for place in range(0, count, _BLOCK):
            os.write(descriptor, block[: count - place])
        if synced:
            os.fsync(descriptor)
        os.close(descriptor)

    return write


def to_host(leaves: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Every leaf copied into pinned memory that is there already."""
    pinned = {name: torch.empty_like(leaf, device="cpu", pin_memory=True) for name, leaf in leaves.items()}

    def copy() -> None:
        for name, leaf in leaves.items():
            pinned[name].copy_(leaf, non_blocking=True)
        torch.cuda.synchronize()

    return copy
