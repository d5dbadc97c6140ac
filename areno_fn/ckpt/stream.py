"""Tensors read from files straight to where they are to be, piece by piece, by several threads.

Beside the tensors themselves no more memory is used than the ring has. Bytes for the CPU that need no conversion go
from the file into the tensor; all others through the ring.
"""

from __future__ import annotations

import collections
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import attrs
import torch

from areno_fn.ckpt.header import Header
from areno_fn.ckpt.host import memory
from areno_fn.ckpt.ring import PIECE, Ring
from areno_fn.ckpt.tensorfile import Reader


@attrs.frozen(eq=False)
class Wanted:
    """A tensor of a file, and the tensor of the same shape that it is to fill.

    Attributes:
        header: the file.
        name: the tensor in it.
        out: on any device, with any strides; what is read is converted to its dtype.
    """

    header: Header
    name: str
    out: torch.Tensor


_Job = tuple[Wanted, Future[None] | None]
_AHEAD = 4


def stream(reader: Reader, wanted: Iterable[Wanted], ring: Ring, threads: int) -> Generator[str, None, None]:
    """Reads tensors, and gives the name of each when it and all before it have been read.

    A file is closed when a tensor of another one has come, so `wanted` should not jump between files. On a device the
    last tensors are there when the iteration has ended.

    Raises:
        CheckpointError: a file changed or cannot be read. Whatever the threads did, it is about the first piece
            that could not be read.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
    ring.begin()
    try:
        before = None
        for item, read in _in_order(_submitted(pool, reader, ring, wanted), _AHEAD * threads):
            if read is not None:
                read.result()
                continue
            if before is not None and before != item.header.path:
                reader.close(before)
            before = item.header.path
            yield item.name
        ring.finish()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submitted(pool: ThreadPoolExecutor, reader: Reader, ring: Ring, wanted: Iterable[Wanted]) -> Iterator[_Job]:
    """The pieces of every tensor, each on its way, and None after the last one of it."""
    for item in wanted:
        entry = item.header.entries[item.name]
        dtype = entry.spec.dtype or item.out.dtype
        for start, out in _cut(item.out.detach(), entry.start, dtype.itemsize):
            yield item, pool.submit(_read, reader, ring, item.header, start, out, dtype)
        yield item, None


def _in_order(jobs: Iterator[_Job], ahead: int) -> Iterator[_Job]:
    """The same jobs, each when at most `ahead` later ones have been begun, so that few files are open at a time."""
    begun: collections.deque[_Job] = collections.deque()
    for job in jobs:
        begun.append(job)
        if len(begun) > ahead:
            yield begun.popleft()
    yield from begun


def _cut(out: torch.Tensor, start: int, itemsize: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of `out`, each with the place where its bytes begin in the file; none is larger than a piece."""
    if out.is_contiguous():
        out = out.view(-1)
    nbytes = out.numel() * itemsize
    if nbytes == 0:
        return
    if nbytes <= PIECE:
        yield start, out
        return
    row = nbytes // out.shape[0]
    rows = PIECE // row
    if not rows:
        for number in range(out.shape[0]):
            yield from _cut(out[number], start + number * row, itemsize)
        return
    for first in range(0, out.shape[0], rows):
        yield start + first * row, out[first : first + rows]


def _read(reader: Reader, ring: Ring, header: Header, start: int, out: torch.Tensor, dtype: torch.dtype) -> None:
    if out.is_cpu and out.dtype == dtype and out.is_contiguous():
        reader.fill(header, start, memory(out))
        return
    with ring.lane() as lane:
        buffer = lane.buffer(out.numel() * dtype.itemsize)
        reader.fill(header, start, memory(buffer))
        lane.move(buffer.view(dtype).view(out.shape), out)
