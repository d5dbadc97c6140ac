"""`Reading`: what is read of texts in one step, under a budget of tokens.

A part of a text begins where the pages of its sequence end, and is laid beside the parts of other texts, padded to the
longest one. Only the first text of a step is ever cut, so that nothing is padded to a part of a long one; whoever does not fit
beside it comes with the next step, and is the first then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from areno_fn.steps.token.lanes import on_device


class Part(NamedTuple):
    """Tokens of a text that are read at once.

    Attributes:
        tokens: at least one.
        stored: how many tokens of the text come before them, and have been read.
        pages: those of the text.
    """

    tokens: Sequence[int]
    stored: int
    pages: Sequence[int]


class Reading:
    """Parts of texts that are read together: at most `budget` tokens, padding included."""

    def __init__(self, budget: int) -> None:
        self.parts: list[Part] = []
        self._budget, self._longest = budget, 0

    def allows(self, remaining: int) -> int:
        """How many of the tokens that remain of a text may be read beside what is there: some, all or none of them."""
        if not self.parts:
            return min(remaining, self._budget)
        return remaining if max(self._longest, remaining) * (len(self.parts) + 1) <= self._budget else 0

    def add(self, part: Part) -> int:
        """One part more, and its row."""
        self.parts.append(part)
        self._longest = max(self._longest, len(part.tokens))
        return len(self.parts) - 1

    def arrays(self, page_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Tokens [n, L], their lengths [n] and a table [n, W]; and where a text was cut before, what is stored [n]."""
        tokens = [[*part.tokens, *[0] * (self._longest - len(part.tokens))] for part in self.parts]
        width = -(-max(part.stored + len(part.tokens) for part in self.parts) // page_size)
        table = [[*part.pages, *[0] * (width - len(part.pages))][:width] for part in self.parts]
        arrays = [tokens, [len(part.tokens) for part in self.parts], table]
        stored = [part.stored for part in self.parts]
        return tuple(on_device(values, device) for values in (*arrays, *([stored] if any(stored) else [])))
