"""Rows of a batch: documents or pairs of documents, taken in any order and packed again, or rows of latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.batch import Experience, PackedTokens, Pairs
from areno_fn.contracts.flow_batch import Denoising, Noised
from areno_fn.contracts.flow_match import Replay
from areno_fn.contracts.record import replace

Take = Callable[[Any, Sequence[int]], Any]
"""`(batch, rows) -> batch` with those rows alone, in that order."""


def count(batch: Any) -> int:
    """How many rows a batch has.

    They are the documents of `PackedTokens`, `Experience` and `Denoising`, the pairs of `Pairs`, the steps of `Replay`, and
    the samples of `Noised`, or its groups where it has some.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(batch, Denoising):
        return batch.documents
    if isinstance(batch, Noised | Replay):
        return len(_owners(batch))
    if isinstance(batch, Pairs):
        return batch.packed.documents // 2
    return _packed(batch).documents


def take(batch: Any, rows: Sequence[int]) -> Any:
    """The rows of a batch, laid end to end in the order given.

    Args:
        batch: one whose rows `count` knows.
        rows: at least one, each in [0, count).

    Raises:
        TypeError: the batch is none of these.
    """
    if isinstance(batch, Noised | Denoising | Replay):
        return _taken(batch, rows)
    packed = _packed(batch)
    documents = [number for row in rows for number in ((2 * row, 2 * row + 1) if isinstance(batch, Pairs) else (row,))]
    of_decisions, device = packed.segments[packed.index], packed.tokens.device
    tokens = [(packed.segments == number).nonzero().flatten() for number in documents]
    decisions = [(of_decisions == number).nonzero().flatten() for number in documents]
    lengths = torch.tensor([len(places) for places in tokens], device=device)
    starts = (lengths.cumsum(0) - lengths).tolist()
    moved = [packed.index[d] - places[0] + start for d, places, start in zip(decisions, tokens, starts, strict=True)]
    order, chosen = torch.cat(tokens), torch.cat(decisions)
    taken = PackedTokens(
        tokens=packed.tokens[order],
        positions=packed.positions[order],
        segments=torch.arange(len(documents), device=device).repeat_interleave(lengths),
        index=torch.cat(moved),
        targets=packed.targets[chosen],
        weight=packed.weight[chosen],
        kept=None if packed.kept is None else packed.kept[chosen],
        documents=len(documents),
        longest=int(lengths.max()),
    )
    if isinstance(batch, PackedTokens):
        return taken
    others = {name: value[chosen] for name, value in _data(batch).items()}
    return replace(batch, packed=taken, **others)


def parts(batch: Any, order: Sequence[int], number: int, take: Take) -> list[Any]:
    """The rows in an order, cut into so many parts whose sizes differ by at most one.

    Raises:
        ValueError: there are fewer rows than parts.
    """
    if not 1 <= number <= len(order):
        raise ValueError(
            f"a batch of {len(order)} rows cannot be cut into {number} parts; give it at least {number} rows"
        )
    return [take(batch, piece.tolist()) for piece in torch.tensor(list(order)).tensor_split(number)]


def _taken(batch: Noised | Denoising | Replay, rows: Sequence[int]) -> Any:
    owners = _owners(batch)
    pieces = [owners[row] for row in rows]
    chosen = torch.cat(pieces)
    taken = tree.map(lambda x: x[chosen], batch)
    if not isinstance(batch, Denoising):
        return taken
    lengths = torch.tensor([len(piece) for piece in pieces], device=chosen.device)
    segments = torch.arange(len(pieces), device=chosen.device).repeat_interleave(lengths)
    return replace(taken, segments=segments, documents=len(pieces))


def _owners(batch: Noised | Denoising | Replay) -> list[torch.Tensor]:
    """The places of every row: those of a document or a group, which are compared with each other, stay together."""
    places = torch.arange(batch.weight.shape[0], device=batch.weight.device)
    if isinstance(batch, Denoising):
        return [places[batch.segments == number] for number in range(batch.documents)]
    if isinstance(batch, Noised) and batch.groups is not None:
        return [places[batch.groups == group] for group in batch.groups.unique()]
    return list(places.split(1))


def _packed(batch: Any) -> PackedTokens:
    if isinstance(batch, PackedTokens):
        return batch
    if isinstance(batch, Experience | Pairs):
        return batch.packed
    raise TypeError(
        f"the rows of a {type(batch).__name__} are not known; give `rows`, their number, and `take`, a function "
        f"(batch, rows) -> batch"
    )


def _data(batch: Experience | Pairs) -> dict[str, torch.Tensor]:
    """The numbers beside the documents, one for every decision, by field."""
    return {path: leaf for path, leaf in tree.leaves_with_path(batch) if not path.startswith("packed.")}
