"""The header of a safetensors file, read as if it came from an enemy.

A file is eight bytes with the length of the header, the header (JSON), and the bytes of the tensors without
gaps. Everything is checked against the size of the file before a byte of a tensor is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.paths import open_file
from areno_fn.ckpt.words import brief
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

METADATA = "__metadata__"
"""What stands under this name in a header is no tensor."""

_MOST_DIMS = 64

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes of the format that torch has, complex numbers left out."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen
class Entry:
    """A tensor in a file.

    Attributes:
        spec: its shape and dtype.
        start, stop: where its bytes are, counted from the beginning of the file.
    """

    spec: TensorSpec
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.stop - self.start


@attrs.frozen
class Header:
    """What a safetensors file says about itself.

    Attributes:
        path: the file.
        size: its length in bytes.
        metadata: its free-form strings; empty when there are none.
        entries: its tensors, in the order of their bytes.
    """

    path: Path
    size: int
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    @property
    def data(self) -> int:
        """Where the bytes of the tensors begin."""
        return min((entry.start for entry in self.entries.values()), default=self.size)


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated, over-long, or its header is not valid.
    """
    descriptor = open_file(path)
    try:
        size = os.fstat(descriptor).st_size
        prefix = os.pread(descriptor, 9, 0)
        length = _header_length(path, prefix[:8], size)
        _require_brace(path, prefix[8:])  # before as much is read as the file claims
        return parse_header(path, _read(descriptor, length), size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    finally:
        os.close(descriptor)


def parse_header(path: Path, raw: bytes, size: int) -> Header:
    """Checks the JSON of a header, `raw`, against the length of its file.

    Raises:
        CheckpointError: it is not a header, or does not describe exactly the bytes that follow it.
    """
    _require_brace(path, raw[:1])
    values = strict_json(raw, f"the header of {path}", finite=True)
    metadata = values.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"the header of {path}: {METADATA} must map strings to strings")
    data = 8 + len(raw)
    entries = {name: _entry(path, name, value, data) for name, value in values.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _require_exact_cover(path, ordered, data, size)
    return Header(path, size, metadata, ordered)


def _require_brace(path: Path, first: bytes) -> None:
    if first != b"{":
        raise CheckpointError(f"the header of {path} must begin with '{{', it begins with {first!r}")


def _read(descriptor: int, length: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        file.seek(8)
        return file.read(length)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path} has {size} bytes, expected at least 8: it is truncated or not a safetensors file"
        )
    length = int.from_bytes(prefix, "little")
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{path} declares a header of {length} bytes, at most {LONGEST_HEADER} are allowed: it is damaged"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is truncated: its header needs {8 + length} bytes, expected at least that, but it has {size}; copy it again"
        )
    return length


def _entry(path: Path, name: str, value: Any, data: int) -> Entry:
    where = f"the header of {path}: tensor {brief(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where} has dtype {brief(value['dtype'])}, known are {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _naturals(shape) or len(shape) > _MOST_DIMS:
        raise CheckpointError(f"{where} has shape {brief(shape)}, a list of at most {_MOST_DIMS} sizes is needed")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {brief(offsets)}, a start and an end are needed")
    spec = TensorSpec(tuple(shape), dtype)
    expected, actual = spec.numel * dtype.itemsize, offsets[1] - offsets[0]
    if expected != actual:
        raise CheckpointError(f"{where} is {spec} and needs {expected} bytes, but its offsets give it {actual}")
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 1 << 63:  # empty, but with strides beyond 64 bits
        raise CheckpointError(f"{where} has shape {brief(shape)}, which no tensor can have")
    return Entry(spec, data + offsets[0], data + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _require_exact_cover(path: Path, entries: Mapping[str, Entry], data: int, size: int) -> None:
    end, before = data, "the header"
    for name, entry in entries.items():
        if entry.start != end:
            kind = "overlaps" if entry.start < end else "leaves a gap after"
            raise CheckpointError(
                f"the header of {path}: tensor {brief(name)} begins at byte {entry.start - data} of the data and {kind} "
                f"{before}, which ends at {end - data}"
            )
        end, before = entry.stop, brief(name)
    if end != size:
        kind = "truncated" if size < end else "over-long"
        raise CheckpointError(f"{path} is {kind}: expected {end} bytes by its header, it has {size}; copy it again")
