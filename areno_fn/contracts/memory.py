"""Where tensors stand in memory, and which of them share bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch


@attrs.frozen(kw_only=True, eq=False)
class Place:
    """Where a tensor stands.

    Attributes:
        path: what messages call it.
        owner: who it belongs to, for example `("params", "actor")`.
        tensor: the tensor; not empty.
        space: what its addresses count in: a device, or a storage that has none.
        storage: its storage, as one number.
        start: its first byte.
        stop: the byte behind its last one.
    """

    path: str
    owner: tuple[str, str]
    tensor: torch.Tensor
    space: str
    storage: int
    start: int
    stop: int

    def same(self, other: Place) -> bool:
        """Whether two tensors of one space are one: the same elements of the same memory in the same order."""
        one, two = self.tensor, other.tensor
        alike = one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride()
        return alike and self.start == other.start


def one_place_each(tensor: torch.Tensor) -> bool:
    """Whether every element of a tensor has a place of its own in memory, unlike those that `expand` makes."""
    steps = sorted((abs(s), n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    reach = 0  # of the dimensions so far
    for stride, length in steps:
        if stride <= reach:
            return not any(stride == 0 for stride, _ in steps) and _distinct(steps)
        reach += stride * (length - 1)
    return True


def _distinct(steps: list[tuple[int, int]]) -> bool:
    """The same, of strides that interleave: all places are counted."""
    places = torch.zeros(1, dtype=torch.int64)
    for stride, length in steps:
        places = (places[:, None] + stride * torch.arange(length)).flatten()
    ordered = places.sort().values
    return bool((ordered.diff() > 0).all())


def place(path: str, owner: tuple[str, str], tensor: torch.Tensor) -> Place:
    """The place of a tensor that is not empty; a meta tensor has one in its own storage alone."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    address = storage.data_ptr()
    start = address + int(tensor.storage_offset()) * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Place(
        path=path,
        owner=owner,
        tensor=tensor,
        space=str(tensor.device) if address else f"storage {storage._cdata}",
        storage=address or storage._cdata,
        start=start,
        stop=start + (int(last) + 1) * size,
    )


def overlaps(places: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    """The pairs that share a byte, each in the order in which the two were given.

    What interleaves without sharing a byte, as two columns of a matrix do, is no pair. Storages that are several
    objects over one memory are seen through.
    """
    rank = {id(one): number for number, one in enumerate(places)}
    reaching: list[Place] = []
    for one in sorted(places, key=lambda p: (p.space, p.start)):
        reaching = [other for other in reaching if other.space == one.space and other.stop > one.start]
        for other in reaching:
            if _share_byte(one, other):
                yield (other, one) if rank[id(other)] < rank[id(one)] else (one, other)
        reaching.append(one)


def _share_byte(one: Place, other: Place) -> bool:
    """Whether two tensors, whose ranges of bytes meet, have a byte in common."""
    if one.same(other) or (one.tensor.is_contiguous() and other.tensor.is_contiguous()):
        return True
    low = min(one.start, other.start)
    taken = torch.zeros(max(one.stop, other.stop) - low, dtype=torch.bool)
    _bytes(taken, one, low).fill_(True)
    return bool(_bytes(taken, other, low).any())


def _bytes(memory: torch.Tensor, one: Place, low: int) -> torch.Tensor:
    """The bytes of a tensor within the memory from `low` on, as a view."""
    size = one.tensor.element_size()
    strides = [stride * size for stride in one.tensor.stride()]
    return memory.as_strided([*one.tensor.shape, size], [*strides, 1], one.start - low)
