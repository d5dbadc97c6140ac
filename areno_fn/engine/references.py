"""What the frozen reference of a phase says of its pairs, computed once for every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from areno_fn.contracts.batch import PackedTokens, Pair
from areno_fn.steps.token.pairs import decisions, pack_pairs, plan_pairs


class References:
    """Log-probabilities by row, filled in as rows are asked for.

    Which rows are computed together depends on the data alone, never on which are asked for, so that a run that
    goes on from a checkpoint, with nothing filled in, gets the same bits.
    """

    def __init__(self, pairs: Sequence[Pair], micro_tokens: int) -> None:
        self._pairs = pairs
        self._chunk_of = {row: chunk for chunk in plan_pairs(pairs, micro_tokens) for row in chunk}
        self._known: dict[int, torch.Tensor] = {}

    def of(self, rows: Sequence[int], compute: Callable[[PackedTokens], torch.Tensor]) -> list[torch.Tensor]:
        """The log-probabilities of every row's decisions, on the CPU.

        Args:
            rows: indices of pairs.
            compute: gives the log-probabilities [M] of packed documents under the reference.
        """
        for row in rows:
            if row not in self._known:
                self._fill(self._chunk_of[row], compute)
        return [self._known[row] for row in rows]

    def _fill(self, chunk: Sequence[int], compute: Callable[[PackedTokens], torch.Tensor]) -> None:
        pairs = [self._pairs[row] for row in chunk]
        found = compute(pack_pairs(pairs)).cpu().split([decisions(pair) for pair in pairs])
        self._known.update(zip(chunk, found, strict=True))
