"""Tensors of any size, read and worked on a piece at a time, several pieces at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import attrs
import torch

from areno_fn.ckpt.header import Entry, Header
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.layout import TensorSpec

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound="Addable")

PIECE = 1 << 19
"""Elements of a piece: in float64, 4 MiB."""

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)`, of pieces."""

THREADS = min(8, os.cpu_count() or 1)


class Addable(Protocol):
    """What is known of some elements, and can be added to what is known of others."""

    def __add__(self: V, other: V) -> V:
        """Of the elements of both."""
        ...


def piece(reader: Reader, header: Header, name: str, first: int) -> torch.Tensor:
    """The elements of a tensor from the one numbered `first` on, in row-major order, at most `PIECE`.

    Returns:
        A vector on the CPU in the file's dtype.

    Raises:
        CheckpointError: the file changed under the reader.
    """
    entry = header.entries[name]
    count = entry.spec.numel
    width, last = entry.nbytes // count, min(first + PIECE, count)
    part = Entry(TensorSpec((last - first,), entry.spec.dtype), entry.start + first * width, entry.start + last * width)
    return reader.read(attrs.evolve(header, entries={name: part}), name)


def summed(
    work: Callable[[K, int], V], lengths: Mapping[K, int], nothing: V, progress: Progress | None = None
) -> dict[K, V]:
    """For every key, the sum of `work(key, first)` over its pieces, always added in the order of the pieces.

    Args:
        work: what is known of the elements from `first` on; called in several threads.
        lengths: how many elements each key has.
        nothing: what is known of no elements.
        progress: told after every piece.
    """
    found = dict.fromkeys(lengths, nothing)
    done, total = 0, sum(-(-length // PIECE) for length in lengths.values())
    with _one_thread_each(), ThreadPoolExecutor(THREADS, thread_name_prefix="piece") as pool:
        for key, value in _in_order(pool, work, lengths):
            found[key] = found[key] + value
            done += 1
            if progress is not None:
                progress(done, total)
    return found


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch's own threads would wait for each other at every step of every piece."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_order(pool: ThreadPoolExecutor, work: Callable[[K, int], V], lengths: Mapping[K, int]) -> Iterator[tuple[K, V]]:
    waiting: deque[tuple[K, Future[V]]] = deque()
    for key, length in lengths.items():
        for first in range(0, length, PIECE):
            waiting.append((key, pool.submit(work, key, first)))
            if len(waiting) > 2 * THREADS:
                done, result = waiting.popleft()
                yield done, result.result()
    for done, result in waiting:
        yield done, result.result()
