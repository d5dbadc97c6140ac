"""Safetensors files, read and written tensor by tensor, so that no more than one needs to be in memory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch

from areno_fn.ckpt import disk
from areno_fn.ckpt.atomic import write_all
from areno_fn.ckpt.header import DTYPE_NAMES, LONGEST_HEADER, METADATA, Header
from areno_fn.ckpt.host import memory, passing
from areno_fn.ckpt.outbound import outbound
from areno_fn.ckpt.paths import open_file
from areno_fn.ckpt.words import brief, encoded
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec, spec_of

_CHUNK = 1 << 20
_FLUSH = 1 << 25
_ALIGN = 8


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    fetch: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    watch: Callable[[memoryview], None] | None = None,
) -> int:
    """Writes a new file and returns when it is on the disk.

    Args:
        path: the file; it must not exist.
        specs: name, shape and dtype of every tensor.
        fetch: gives each tensor when its turn comes, on any device and with any strides; the file holds its
            elements in row-major order.
        metadata: free-form strings.
        watch: sees every piece of the file in order, for a checksum.

    Returns:
        The length of the file.

    Raises:
        CheckpointError: a name, a dtype or metadata that the format has not, or a fetched tensor that is not what was
            declared.
        OSError: the disk refuses.
    """
    names = sorted(specs, key=lambda name: (-_dtype(name, specs[name]).itemsize, name))
    descriptor = disk.create(path)
    try:
        file = _Growing(descriptor, watch)
        file.put(memoryview(_header(names, specs, metadata)))
        for data in outbound(_fetched(names, specs, fetch)):
            file.put(data)
            del data  # and with it the tensor, before the next one is made
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
    return file.size


class _Growing:
    """A file that is written from front to back, and is on its way to the disk meanwhile."""

    def __init__(self, descriptor: int, watch: Callable[[memoryview], None] | None) -> None:
        self.size = 0
        self._descriptor, self._watch = descriptor, watch
        self._flushed = 0

    def put(self, data: memoryview) -> None:
        for start in range(0, len(data), _CHUNK):
            piece = data[start : start + _CHUNK]
            if self._watch is not None:
                self._watch(piece)
            write_all(self._descriptor, piece)
            self.size += len(piece)
            if self.size - self._flushed >= _FLUSH:
                disk.begin_flush(self._descriptor, self._flushed, self.size - self._flushed)
                self._flushed = self.size


def _fetched(
    names: Iterable[str], specs: Mapping[str, TensorSpec], fetch: Callable[[str], torch.Tensor]
) -> Iterator[torch.Tensor]:
    for name in names:
        tensor = fetch(name)
        if tensor.is_meta or not specs[name].admits(tensor):
            received = f"{spec_of(tensor)} on {tensor.device}"
            raise CheckpointError(f"{name!r} was to be written as {specs[name]}, but it is {received}")
        yield tensor
        del tensor  # before the next one is made


class Reader:
    """Reads tensors of files whose headers are known. A context manager; it keeps each file open that it has read.

    Several threads may read with one.
    """

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in list(self._open):
            self.close(path)

    def close(self, path: Path) -> None:
        """Closes a file, if it is open; a later read opens it again."""
        with self._lock:
            descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def read(self, header: Header, name: str) -> torch.Tensor:
        """A new tensor on the CPU with the dtype it has in the file."""
        entry = header.entries[name]
        tensor = passing(entry.spec.shape, entry.spec.dtype or torch.uint8, torch.device("cpu"))
        self.fill(header, entry.start, memory(tensor))
        return tensor

    def bytes(self, header: Header, start: int, stop: int) -> bytes:
        """A stretch of a file as it is."""
        out = bytearray(stop - start)
        self.fill(header, start, memoryview(out))
        return bytes(out)

    def fill(self, header: Header, start: int, *views: memoryview) -> None:
        """Fills `views`, one after the other, with the bytes of a file from `start` on; raises as `fill` does."""
        with self._lock:
            if header.path not in self._open:
                self._open[header.path] = open_unchanged(header)
            descriptor = self._open[header.path]
        fill(descriptor, header, start, *views)


def open_unchanged(header: Header) -> int:
    """A descriptor of the file that has this header.

    Raises:
        CheckpointError: it has another length by now, or cannot be read.
    """
    descriptor = open_file(header.path)
    size = os.fstat(descriptor).st_size
    if size != header.size:
        os.close(descriptor)
        raise CheckpointError(f"{header.path} had {header.size} bytes when its header was read, now it has {size}")
    return descriptor


def fill(descriptor: int, header: Header, start: int, *views: memoryview) -> None:
    """Fills `views`, one after the other, with the bytes of a file from `start` on.

    Raises:
        CheckpointError: the file is shorter than when its header was read, or the disk refuses.
    """
    place = start
    left = [view for view in views if view]
    while left:
        try:
            count = os.preadv(descriptor, left, place)
        except OSError as error:
            raise CheckpointError(f"{header.path} cannot be read ({error.strerror}), at byte {place}") from error
        if not count:
            raise CheckpointError(f"{header.path} was cut short while it was read, at byte {place} of {header.size}")
        left, place = _after(left, count), place + count


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` when their first `count` bytes have been filled."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _header(names: list[str], specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    if METADATA in specs:
        raise CheckpointError(f"a tensor cannot be named {METADATA!r}, where the format keeps its metadata; rename it")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CheckpointError(f"metadata maps strings to strings, received {brief(key)}: {brief(value)}")
    values: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    place = 0
    for name in names:
        spec = specs[name]
        dtype = _dtype(name, spec)
        end = place + spec.numel * dtype.itemsize
        values[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(spec.shape), "data_offsets": [place, end]}
        place = end
    text = encoded(json.dumps(values, separators=(",", ":"), ensure_ascii=False), "the header of a file")
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"the header would need {len(text)} bytes, at most {LONGEST_HEADER} are allowed")
    return len(text).to_bytes(8, "little") + text


def _dtype(name: str, spec: TensorSpec) -> torch.dtype:
    if spec.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name!r} has dtype {spec.dtype}, which a safetensors file cannot hold")
    return spec.dtype
