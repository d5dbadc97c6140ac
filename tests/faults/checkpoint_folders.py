"""Small checkpoints as dicts from names to contents, whole ones, and how they are put on the disk."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import attrs
import safetensors.torch
import torch

from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.llama import checkpoint, model

CONFIG = DecoderConfig(
    vocab_size=7, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)
LAYOUT = checkpoint.layout(CONFIG, head_in_file=True)
OUTSIDE = "outside.safetensors"
"""A valid file beside the folder, with every tensor of the model: what is read from it has left the folder."""


@attrs.frozen
class Special:
    """Something in a folder that is not a regular file of given bytes."""

    kind: str
    target: str = ""


Content = bytes | Special
Folder = dict[str, Content]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in LAYOUT.source.items()}


def whole(shards: int) -> Folder:
    """A checkpoint without a fault, in one file or several."""
    made = tensors(0)
    config = json.dumps(model.config_to_hf(CONFIG)).encode()
    if shards == 1:
        return {"config.json": config, SINGLE: safetensors.torch.save(made, metadata={"format": "pt"})}
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(made)}
    files = {
        name: safetensors.torch.save({t: made[t] for t, file in weight_map.items() if file == name}) for name in names
    }
    index = {"metadata": {"total_size": sum(t.nbytes for t in made.values())}, "weight_map": weight_map}
    return {"config.json": config, INDEX: json.dumps(index).encode(), **files}


def write(root: Path, folder: Folder) -> Path:
    """Puts a folder on the disk as `root/model`, with a file beside it that must not be read."""
    (root / OUTSIDE).write_bytes(safetensors.torch.save(tensors(1)))
    path = root / "model"
    path.mkdir()
    for name, content in folder.items():
        place = path / name
        if isinstance(content, bytes):
            place.write_bytes(content)
        elif content.kind == "link":
            place.symlink_to(content.target)
        elif content.kind == "pipe":
            os.mkfifo(place)
        elif content.kind == "socket":
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(str(place))
        elif content.kind == "folder":
            place.mkdir()
        elif content.kind == "sparse":
            with place.open("wb") as file:
                file.write(bytes.fromhex(content.target))
                file.truncate(1 << 40)
    return path
