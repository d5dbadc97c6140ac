"""Micro-batches of few sizes, so that an update of many steps has few shapes: documents of padding, decisions that weigh 0.

All micro-batches of a step become alike. Padding changes no result beyond roundings: it stands in documents of its own, which
no other attends to, and nothing of it is in a numerator or a denominator.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import torch
import torch.nn.functional as F

from areno_fn.contracts.batch import Experience, PackedTokens, Pairs
from areno_fn.contracts.record import replace

Batch = TypeVar("Batch", PackedTokens, Experience, Pairs)

_OCTAVE = 16
"""Sizes between a power of two and the next."""
_SHORTEST = 64
"""Least bound of the length of documents."""


@attrs.frozen(kw_only=True)
class Sizes:
    """What decides the shape of a micro-batch.

    Attributes:
        tokens: N.
        documents: number of them.
        longest: bound of their lengths.
        decisions: M.
    """

    tokens: int
    documents: int
    longest: int
    decisions: int = 0

    @property
    def uniform(self) -> bool:
        """Whether all documents have one length."""
        return self.tokens == self.documents * self.longest

    def takes(self, own: Sizes) -> bool:
        """Whether a micro-batch can be padded to these sizes: no document of padding may be empty or too long."""
        tokens, documents = self.tokens - own.tokens, self.documents - own.documents
        return tokens == documents == 0 or 1 <= documents <= tokens <= documents * self.longest


def rounded(count: int) -> int:
    """The least size that holds so many: 16 of them between a power of two and the next, at most 1/16 too many."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 5))
    return max(_OCTAVE, -(-count // step) * step)


def coarse(count: int) -> int:
    """The least number of documents that holds so many: even, and four of them between a power of two and the next."""
    step = max(2, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def common(sizes: Sequence[Sizes]) -> Sizes:
    """The sizes that all micro-batches of a step are padded to, a function of theirs.

    Where all have the same number of documents of one length, which is a size, those stay.

    Args:
        sizes: of the micro-batches, at least one; of those of pairs the number of documents is even, and stays so.
    """
    first, decisions = sizes[0], rounded(max(own.decisions for own in sizes))
    fixed = first.uniform and rounded(first.longest) == first.longest
    if fixed and len({(own.tokens, own.documents, own.longest) for own in sizes}) == 1:
        return attrs.evolve(first, decisions=decisions)
    longest = max(_SHORTEST, 1 << (max(own.longest for own in sizes) - 1).bit_length())
    found = Sizes(
        tokens=rounded(max(own.tokens for own in sizes)),
        documents=coarse(max(own.documents for own in sizes)),
        longest=longest,
        decisions=decisions,
    )
    while not all(found.takes(own) for own in sizes):
        needed = [own.documents + -(-(found.tokens - own.tokens) // longest) for own in sizes]
        documents = coarse(max(needed))
        tokens = rounded(max(own.tokens + documents - own.documents for own in sizes))
        found = attrs.evolve(found, tokens=max(tokens, found.tokens), documents=max(documents, found.documents))
    return found


def plan_alike(rows: Sequence[Sequence[int]], micro_tokens: int) -> list[list[int]]:
    """Assigns whole rows to micro-batches of about equally many tokens, as few as the budget allows with their padding.

    The longest rows come first, each to the micro-batch that has least so far. A row that is longer than the budget makes
    its own size, padding included, the budget.

    Args:
        rows: the lengths of the documents of each, at least one.
        micro_tokens: the budget.

    Returns:
        For every micro-batch the indices of its rows; each index occurs exactly once.
    """
    lengths = [sum(row) for row in rows]
    alone = common([_sizes_of(rows, [lengths.index(max(lengths))])])
    most, parts = max(micro_tokens, alone.tokens), max(1, -(-sum(lengths) // micro_tokens))
    while True:
        batches = _spread(lengths, parts)
        if parts >= len(rows) or common([_sizes_of(rows, batch) for batch in batches]).tokens <= most:
            return batches
        parts += 1


def alike(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """The micro-batches of a step, padded to the sizes that they have in common."""
    own = [_packed(batch) for batch in batches]
    sizes = common([_sizes(packed) for packed in own])
    return tuple(_padded(batch, sizes) for batch in batches)


def _spread(lengths: Sequence[int], parts: int) -> list[list[int]]:
    parts = min(parts, len(lengths))
    batches: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, place) for place in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        load, place = heapq.heappop(loads)
        batches[place].append(row)
        heapq.heappush(loads, (load + lengths[row], place))
    return batches


def _sizes_of(rows: Sequence[Sequence[int]], batch: Sequence[int]) -> Sizes:
    documents = [length for row in batch for length in rows[row]]
    return Sizes(tokens=sum(documents), documents=len(documents), longest=max(documents))


def _sizes(packed: PackedTokens) -> Sizes:
    return Sizes(
        tokens=packed.tokens.shape[0],
        documents=packed.documents,
        longest=packed.longest,
        decisions=packed.targets.shape[0],
    )


def _packed(batch: PackedTokens | Experience | Pairs) -> PackedTokens:
    return batch if isinstance(batch, PackedTokens) else batch.packed


def _padded(batch: Any, sizes: Sizes) -> Any:
    if isinstance(batch, PackedTokens):
        return _with_padding(batch, sizes)
    more = sizes.decisions - batch.packed.targets.shape[0]
    names = ("reference",) if isinstance(batch, Pairs) else _RECORDED
    known = {name: getattr(batch, name) for name in names}
    filled = {name: F.pad(values, (0, more)) for name, values in known.items() if values is not None}
    return replace(batch, packed=_with_padding(batch.packed, sizes), **filled)


_RECORDED = ("old", "advantage", "reference", "rollout", "values", "returns")


def _with_padding(packed: PackedTokens, sizes: Sizes) -> PackedTokens:
    tokens, documents = sizes.tokens - packed.tokens.shape[0], sizes.documents - packed.documents
    decisions = sizes.decisions - packed.targets.shape[0]
    device = packed.tokens.device
    place, number = torch.arange(tokens, device=device), torch.arange(decisions, device=device)
    # documents of padding differ by at most one token
    document = place * documents // max(tokens, 1)
    begins = -(-document * tokens // max(documents, 1))
    return PackedTokens(
        tokens=F.pad(packed.tokens, (0, tokens)),
        positions=torch.cat([packed.positions, place - begins]),
        segments=torch.cat([packed.segments, packed.documents + document]),
        # where padding stands, as far as it goes: many rows in one place would be added up one after the other
        index=torch.cat([packed.index, sizes.tokens - 1 - number % sizes.tokens]),
        targets=F.pad(packed.targets, (0, decisions)),
        weight=F.pad(packed.weight, (0, decisions)),
        kept=None if packed.kept is None else F.pad(packed.kept, (0, decisions), value=1),
        documents=sizes.documents,
        longest=sizes.longest,
    )
