"""Safetensors folders written and read in the plainest way: what a law compares with, written without `ckpt`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from areno_fn.testing.elements import raw

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
STORABLE = frozenset(_NAMES)


@attrs.frozen(eq=False)
class PlainFolder:
    """All that the weight files of a folder say.

    Attributes:
        tensors: by name, over all files.
        metadata: of each file, by its name.
        index: the contents of the index; None when there is a single file.
    """

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Mapping[str, str]]
    index: Mapping[str, Any] | None


def write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    files: int = 1,
    metadata: Mapping[str, str],
    index: Mapping[str, Any],
) -> Path:
    """Writes a folder as Hugging Face lays one out.

    Args:
        folder: is made.
        tensors: what the files hold, in this order.
        config: the contents of config.json.
        files: how many weight files; more than one come with an index.
        metadata: strings in the header of every file.
        index: metadata of the index, beside its `total_size`.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    names = list(tensors)
    each = math.ceil(len(names) / files)
    pieces = [names[start : start + each] for start in range(0, len(names), each)]
    if len(pieces) == 1:
        _write(folder / SINGLE, tensors, metadata)
        return folder
    weight_map: dict[str, str] = {}
    for number, piece in enumerate(pieces, 1):
        file = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        _write(folder / file, {name: tensors[name] for name in piece}, metadata)
        weight_map |= dict.fromkeys(piece, file)
    values = {"metadata": {**index, "total_size": size(tensors)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(values))
    return folder


def read_folder(folder: Path) -> PlainFolder:
    """Reads every weight file of a folder.

    Raises:
        AssertionError: a tensor stands in two files, bytes are covered by no tensor, the index names something
            else than the files hold, or its `total_size` is not exact.
    """
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, dict[str, str]] = {}
    places: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held, metadata[file.name] = _read(file)
        twice = sorted(held.keys() & tensors.keys())
        if twice:
            raise AssertionError(f"{twice[0]!r} stands in {places[twice[0]]} and in {file.name}")
        tensors |= held
        places |= dict.fromkeys(held, file.name)
    path = folder / INDEX
    index = json.loads(path.read_text()) if path.exists() else None
    if index is None and places and set(places.values()) != {SINGLE}:
        raise AssertionError(f"the weights stand in {', '.join(sorted(set(places.values())))} without an index")
    if index is not None:
        if index["weight_map"] != places:
            raise AssertionError("the index names other tensors or other files than there are")
        if index["metadata"]["total_size"] != size(tensors):
            total = index["metadata"]["total_size"]
            raise AssertionError(f"the index says total_size {total}, its tensors have {size(tensors)} bytes")
    return PlainFolder(tensors, metadata, index)


def size(tensors: Mapping[str, torch.Tensor]) -> int:
    """The bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _write(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, tensor in tensors.items():
        start = len(data)
        data += raw(tensor).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def _read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    data = torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8) if len(content) > start else torch.empty(0)
    tensors = {}
    covered = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        covered += end - begin
        piece = data[begin:end].clone() if end > begin else torch.empty(0, dtype=torch.uint8)
        tensors[name] = piece.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if covered != len(content) - start:
        raise AssertionError(f"{file.name} has {len(content) - start} bytes of data, its tensors cover {covered}")
    return tensors, metadata
