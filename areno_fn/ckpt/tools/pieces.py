"""Tensors of any size, read a piece at a time, the next piece while the last one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import TypeVar

import attrs
import torch

from areno_fn.ckpt.header import Entry, Header
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.layout import TensorSpec

T = TypeVar("T")

PIECE = 1 << 20
"""Elements of a piece: in float64, 8 MiB."""


def pieces(reader: Reader, header: Header, name: str, size: int = PIECE) -> Iterator[torch.Tensor]:
    """The elements of a tensor in row-major order, as vectors of at most `size`, on the CPU and in the file's dtype.

    Raises:
        CheckpointError: the file changed under the reader.
    """
    entry = header.entries[name]
    dtype, count = entry.spec.dtype, entry.spec.numel
    width = entry.nbytes // count if count else 0
    for first in range(0, count, size):
        last = min(first + size, count)
        part = Entry(TensorSpec((last - first,), dtype), entry.start + first * width, entry.start + last * width)
        yield reader.read(attrs.evolve(header, entries={name: part}), name)


def ahead(pool: Executor, items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in the pool while the one before is used."""
    upcoming = pool.submit(next, items, None)
    while (item := upcoming.result()) is not None:
        upcoming = pool.submit(next, items, None)
        yield item
