"""The bytes of tensors in order, those of a device copied through pinned memory ahead of being used."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator

import torch

from areno_fn.ckpt.host import memory
from areno_fn.ckpt.ring import PIECE, Lane

_AHEAD = 3


def outbound(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors in row-major order, one after the other.

    A tensor on the CPU is not copied unless it has strides. Of one on a device, pieces are copied while earlier ones
    are used; a piece is valid until the next one is asked for.
    """
    copies: collections.deque[_Copy] = collections.deque()
    lanes: dict[torch.device, Iterator[Lane]] = {}
    for tensor in tensors:
        flat = tensor.detach().contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride
        if flat.is_cpu:
            while copies:
                yield copies.popleft().bytes()
            yield memory(flat)
            del tensor, flat  # before the next one is made
            continue
        if flat.device not in lanes:
            lanes[flat.device] = itertools.cycle([Lane(flat.device) for _ in range(_AHEAD + 1)])
        for piece in flat.split(PIECE // flat.itemsize):
            if len(copies) == _AHEAD:
                yield copies.popleft().bytes()
            copies.append(_Copy(next(lanes[flat.device]), piece))
        del tensor, flat, piece
    while copies:
        yield copies.popleft().bytes()


class _Copy:
    """A piece on its way to the host. It is held until it has arrived."""

    def __init__(self, lane: Lane, piece: torch.Tensor) -> None:
        self._lane, self._piece = lane, piece
        self._buffer = lane.buffer(piece.numel() * piece.itemsize)
        lane.fetch(piece, self._buffer.view(piece.dtype))

    def bytes(self) -> memoryview:
        """The bytes, when they are there."""
        self._lane.wait()
        return memory(self._buffer)
