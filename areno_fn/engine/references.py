"""What the frozen reference of a phase says of its pairs, computed once for every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from areno_fn.contracts.batch import PackedTokens, Pair
from areno_fn.engine.derived import Derived
from areno_fn.steps.token.pairs import decisions, pack_pairs, plan_pairs


class References:
    """Log-probabilities by row, filled in as rows are asked for.

    Which rows are computed together depends on the data alone, never on which are asked for, so that a run that
    goes on from a checkpoint, with nothing filled in, gets the same bits. What another reference said is forgotten.
    """

    def __init__(self, pairs: Sequence[Pair], micro_tokens: int) -> None:
        self._pairs = pairs
        self._chunk_of = {row: chunk for chunk in plan_pairs(pairs, micro_tokens) for row in chunk}
        self._known: Derived[dict[int, torch.Tensor]] = Derived(lambda _: {})

    def of(
        self, rows: Sequence[int], compute: Callable[[PackedTokens], torch.Tensor], reference: Any = None
    ) -> list[torch.Tensor]:
        """The log-probabilities of every row's decisions, on the CPU.

        Args:
            rows: indices of pairs.
            compute: gives the log-probabilities [M] of packed documents under the reference.
            reference: its snapshot, where that may be renewed; what is known is known of this one.
        """
        known = self._known.of(reference)
        for row in rows:
            if row not in known:
                known.update(self._chunk(self._chunk_of[row], compute))
        return [known[row] for row in rows]

    def _chunk(
        self, chunk: Sequence[int], compute: Callable[[PackedTokens], torch.Tensor]
    ) -> Iterable[tuple[int, torch.Tensor]]:
        pairs = [self._pairs[row] for row in chunk]
        found = compute(pack_pairs(pairs)).cpu().split([decisions(pair) for pair in pairs])
        return zip(chunk, found, strict=True)
