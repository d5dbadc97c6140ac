"""From rollouts to text."""

from __future__ import annotations

from areno_fn.contracts.batch import Rollout
from areno_fn.world.tokenizer import Tokenizer


def completions(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The text of every row, without the stop token that ended it."""
    tokens, lengths, finished = rollout.tokens.tolist(), rollout.lengths.tolist(), rollout.finished.tolist()
    return [
        tokenizer.decode(row[: length - 1 if ended else length])
        for row, length, ended in zip(tokens, lengths, finished, strict=True)
    ]
