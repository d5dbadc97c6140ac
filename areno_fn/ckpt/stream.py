"""Tensors read from files straight to where they are to be, piece by piece, by several threads.

Beside the tensors themselves no more memory is used than the ring has. Bytes for the CPU that need no conversion go
from the file into the tensor; all others through the ring.
"""

from __future__ import annotations

import collections
import itertools
import os
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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
    """A stretch of a file and the part of a tensor that it fills."""

    item: Wanted
    start: int
    out: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.out.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file are the bytes of `out`."""
        return self.out.is_cpu and self.out.dtype == self.dtype and self.out.is_contiguous()


_Group = list[_Piece]
"""Pieces that stand one after the other in a file, and are read at once."""

_MOST = 512  # the system takes 1024 stretches of memory at once


def stream(wanted: Sequence[Wanted], ring: Ring, threads: int) -> Generator[str, None, None]:
    """Reads tensors, and gives the name of each when it has been read.

    `wanted` should be in the order of the files. Every thread has an equal share of the bytes, which it reads from
    front to back with a descriptor of its own: so the system reads ahead for each. On a device the last tensors are
    there when the iteration has ended.

    Raises:
        CheckpointError: a file changed or cannot be read. Whatever the threads did, it is about the first stretch
            that could not be read.
    """
    groups = list(_grouped(_pieces(wanted)))
    left = collections.Counter(piece.item for group in groups for piece in group)
    shares = _shares(groups, threads)
    work = _Work(ring, last=len(shares))
    ring.begin()
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        try:
            reading = [pool.submit(work.read, number, share) for number, share in enumerate(shares)]
            for group in work.groups(len(shares)):
                for piece in group:
                    left[piece.item] -= 1
                    if not left[piece.item]:
                        yield piece.item.name
            for share in reading:
                share.result()
            ring.finish()
        finally:
            work.stop_after(-1)


class _Work:
    """What the threads share: which of them may go on, and what they have read."""

    def __init__(self, ring: Ring, last: int) -> None:
        self._ring, self._last = ring, last
        self._lock = threading.Lock()
        self._done: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()

    def stop_after(self, number: int) -> None:
        """Shares beyond this one need not be read any further; those before it are, since they may fail too."""
        with self._lock:
            self._last = min(self._last, number)

    def groups(self, shares: int) -> Iterator[_Group]:
        """What has been read, as it comes, until every share has ended."""
        while shares:
            group = self._done.get()
            if group is None:
                shares -= 1
            else:
                yield group

    def read(self, number: int, share: list[_Group]) -> None:
        """Reads a share from front to back."""
        whole = False
        try:
            for header, groups in itertools.groupby(share, key=lambda group: group[0].item.header):
                self._read_file(number, header, groups)
            whole = True
        finally:
            if not whole:
                self.stop_after(number)
            self._done.put(None)

    def _read_file(self, number: int, header: Header, groups: Iterable[_Group]) -> None:
        descriptor = open_unchanged(header)
        try:
            for group in groups:
                if number > self._last:
                    return
                _read_group(self._ring, descriptor, header, group)
                self._done.put(group)
        finally:
            os.close(descriptor)


def _shares(groups: Sequence[_Group], count: int) -> list[list[_Group]]:
    """At most `count` rows of groups with about as many bytes in each."""
    sizes = [sum(piece.nbytes for piece in group) for group in groups]
    most = -(-sum(sizes) // count)
    shares: list[list[_Group]] = []
    room = 0
    for group, size in zip(groups, sizes, strict=True):
        if room <= 0 and len(shares) < count:
            shares.append([])
            room += most
        shares[-1].append(group)
        room -= size
    return shares


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
        for start, out in _cut(item.out.detach(), entry.start, dtype.itemsize, PIECE // 4):
            yield _Piece(item, start, out, dtype)


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
