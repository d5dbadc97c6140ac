"""Small checkpoints for tests, written by the safetensors library and read back as bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors.torch
import torch
from safetensors import safe_open

from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.contracts.layout import Iso
from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.llama import checkpoint as llama
from areno_fn.models.qwen2 import checkpoint as qwen2
from areno_fn.models.qwen3 import checkpoint as qwen3

LAYOUTS = {"llama": llama.layout, "qwen2": qwen2.layout, "qwen3": qwen3.layout}
SMALL = DecoderConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
)


def small(**changes: Any) -> DecoderConfig:
    return attrs.evolve(SMALL, **changes)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].shape == b[k].shape and a[k].dtype == b[k].dtype and torch.equal(raw(a[k]), raw(b[k])) for k in a
    )


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern, NaNs and infinities included."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def state_dict(
    iso: Iso, dtype: torch.dtype = torch.float32, seed: int = 0, norms: torch.dtype | None = None
) -> dict[str, Any]:
    """Random numbers for the source side of a layout; norms may have a dtype of their own."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, spec in iso.source.items():
        own = norms if norms is not None and "norm" in name else dtype
        made[name] = torch.randn(spec.shape, generator=generator).to(own)
    return made


def write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A Hugging Face folder with `shards` weight files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    strings = {"format": "pt"} if metadata is None else dict(metadata)
    if shards == 1:
        safetensors.torch.save_file(dict(tensors), folder / SINGLE, metadata=strings)
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        safetensors.torch.save_file({name: tensors[name] for name in mine}, folder / file, metadata=strings)
        weight_map |= dict.fromkeys(mine, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def read_files(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, str]]]:
    """All tensors of all safetensors files of a folder, read by the library, and the metadata of each file."""
    tensors: dict[str, torch.Tensor] = {}
    metadata = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            metadata.append(dict(opened.metadata() or {}))
            for name in opened.keys():  # noqa: SIM118
                assert name not in tensors
                tensors[name] = opened.get_tensor(name).clone()
    return tensors, metadata


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path
