"""Tensors read from files straight to where they are to be, piece by piece, by several threads.

Beside the tensors themselves no more memory is used than the ring has. Bytes for the CPU that need no conversion go
from the file into the tensor; all others through the ring.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import attrs
import torch

from areno_fn.ckpt.header import Header
from areno_fn.ckpt.host import memory
from areno_fn.ckpt.ring import PIECE, Ring
from areno_fn.ckpt.tensorfile import fill, open_unchanged


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


@attrs.frozen(eq=False)
class _Piece:
    """A stretch of a file and the part of a tensor that it fills; `last` of the tensor it is the last one."""

    item: Wanted
    start: int
    out: torch.Tensor
    dtype: torch.dtype
    last: bool

    @property
    def nbytes(self) -> int:
        return self.out.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file are the bytes of `out`."""
        return self.out.is_cpu and self.out.dtype == self.dtype and self.out.is_contiguous()


_Group = list[_Piece]
"""Pieces that stand one after the other in a file, and are read at once."""

_RUN = 1 << 26
"""Most bytes that a thread reads from front to back of a file of its own, so that the system reads ahead for each."""

_AHEAD = 4
_MOST = 512  # the system takes 1024 stretches of memory at once


def stream(wanted: Sequence[Wanted], ring: Ring, threads: int) -> Generator[str, None, None]:
    """Reads tensors, and gives the name of each when it and all before it have been read.

    `wanted` should be in the order of the files: what stands together is read at once. On a device the last tensors
    are there when the iteration has ended.

    Raises:
        CheckpointError: a file changed or cannot be read. Whatever the threads did, it is about the first stretch
            that could not be read.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
    ring.begin()
    try:
        total = sum(item.header.entries[item.name].nbytes for item in wanted)
        runs = _runs(_grouped(_pieces(wanted)), min(_RUN, total // (4 * threads)))
        begun = ((run, pool.submit(_read, ring, run)) for run in runs)
        for run, reading in _ahead(begun, _AHEAD * threads):
            reading.result()
            yield from (piece.item.name for group in run for piece in group if piece.last)
        ring.finish()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ahead(
    begun: Iterator[tuple[list[_Group], Future[None]]], count: int
) -> Iterator[tuple[list[_Group], Future[None]]]:
    """The same, each when at most `count` later ones have been begun."""
    waiting: collections.deque[tuple[list[_Group], Future[None]]] = collections.deque()
    for one in begun:
        waiting.append(one)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def _runs(groups: Iterable[_Group], limit: int) -> Iterator[list[_Group]]:
    """Groups of one file, about `limit` bytes of them and at least one."""
    run: list[_Group] = []
    size = 0
    for group in groups:
        if run and (size >= limit or group[0].item.header is not run[0][0].item.header):
            yield run
            run, size = [], 0
        run.append(group)
        size += sum(piece.nbytes for piece in group)
    if run:
        yield run


def _grouped(pieces: Iterable[_Piece]) -> Iterator[_Group]:
    """Pieces that adjoin and go the same way, together no larger than a buffer of the ring."""
    group: _Group = []
    size = 0
    for piece in pieces:
        if group and not (_continues(group, size, piece) and size + piece.nbytes <= PIECE and len(group) < _MOST):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    if group:
        yield group


def _continues(group: _Group, size: int, piece: _Piece) -> bool:
    first = group[0]
    return (
        piece.item.header is first.item.header
        and piece.start == first.start + size
        and size % piece.dtype.itemsize == 0
        and piece.is_direct == first.is_direct
    )


def _pieces(wanted: Iterable[Wanted]) -> Iterator[_Piece]:
    for item in wanted:
        entry = item.header.entries[item.name]
        dtype = entry.spec.dtype or item.out.dtype
        cut = list(_cut(item.out.detach(), entry.start, dtype.itemsize, PIECE // 4))
        for number, (start, out) in enumerate(cut, 1):
            yield _Piece(item, start, out, dtype, last=number == len(cut))


def _cut(out: torch.Tensor, start: int, itemsize: int, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of `out` of at most `limit` bytes, or one element, each with the place where it begins in the file."""
    if out.is_contiguous():
        out = out.view(-1)
    nbytes = out.numel() * itemsize
    if nbytes <= limit or not out.dim():
        yield start, out
        return
    row = nbytes // out.shape[0]
    rows = max(limit // row, 1)
    if rows == 1 and row > limit and out.dim() > 1:
        for number in range(out.shape[0]):
            yield from _cut(out[number], start + number * row, itemsize, limit)
        return
    for first in range(0, out.shape[0], rows):
        yield start + first * row, out[first : first + rows]


def _read(ring: Ring, run: list[_Group]) -> None:
    header = run[0][0].item.header
    descriptor = open_unchanged(header)
    try:
        for group in run:
            _read_group(ring, descriptor, header, group)
    finally:
        os.close(descriptor)


def _read_group(ring: Ring, descriptor: int, header: Header, group: _Group) -> None:
    start = group[0].start
    if group[0].is_direct:
        fill(descriptor, header, start, *(memory(piece.out) for piece in group))
        return
    with ring.lane() as lane:
        buffer = lane.buffer(sum(piece.nbytes for piece in group))
        fill(descriptor, header, start, memory(buffer))
        for piece in group:
            place = piece.start - start
            part = buffer[place : place + piece.nbytes].view(piece.dtype)
            lane.move(part.view(piece.out.shape), piece.out)
