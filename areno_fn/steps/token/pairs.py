"""Pairs of documents in micro-batches: both documents of a pair stand side by side, in one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno_fn.contracts.batch import PackedTokens, Pair, Pairs
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import DataError
from areno_fn.steps.token.pack import pack, plan
from areno_fn.steps.token.sizes import alike, plan_alike


def pack_pairs(pairs: Sequence[Pair]) -> PackedTokens:
    """Lays pairs end to end: document 2k is the chosen one of pair k, document 2k + 1 the rejected one.

    Raises:
        DataError: as `areno_fn.steps.token.pack.pack`.
    """
    return pack([document for pair in pairs for document in pair.documents])


def plan_pairs(pairs: Sequence[Pair], micro_tokens: int) -> list[list[int]]:
    """Assigns whole pairs to micro-batches of at most `micro_tokens` tokens; see `areno_fn.steps.token.pack.plan`."""
    return plan([sum(len(document.tokens) for document in pair.documents) for pair in pairs], micro_tokens)


def decisions(pair: Pair) -> int:
    """How many tokens of a pair are decisions."""
    return sum(sum(document.trained) for document in pair.documents)


@checked
def pair_batches(
    pairs: Sequence[Pair], references: Sequence[torch.Tensor], micro_tokens: int, *, few_sizes: bool = False
) -> tuple[Pairs, ...]:
    """Pairs in the micro-batches of `plan_pairs`, with what the reference says of them.

    Args:
        pairs: at least one.
        references: for each pair float32 [its decisions], those of the chosen document first.
        micro_tokens: the budget.
        few_sizes: in micro-batches of `areno_fn.steps.token.sizes` instead.

    Raises:
        DataError: a pair has another number of decisions than its reference.
    """
    for pair, reference in zip(pairs, references, strict=True):
        if reference.shape != (decisions(pair),):
            raise DataError(
                f"row {pair.chosen.row} has {decisions(pair)} decisions, but its reference has shape {tuple(reference.shape)}"
            )
    lengths = [[len(document.tokens) for document in pair.documents] for pair in pairs]
    planned = plan_alike(lengths, micro_tokens) if few_sizes else plan_pairs(pairs, micro_tokens)
    made = tuple(
        Pairs(packed=pack_pairs([pairs[i] for i in rows]), reference=torch.cat([references[i] for i in rows]))
        for rows in planned
    )
    return alike(made) if few_sizes else made
