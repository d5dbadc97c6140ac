"""From rollouts to what is judged: text, and the tokens themselves."""

from __future__ import annotations

from areno_fn.contracts.batch import Drawn, Rollout
from areno_fn.world.tokenizer import Tokenizer


def completions(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The text of every row, without the stop token that ended it."""
    tokens, lengths, finished = rollout.tokens.tolist(), rollout.lengths.tolist(), rollout.finished.tolist()
    return [
        tokenizer.decode(row[: length - 1 if ended else length])
        for row, length, ended in zip(tokens, lengths, finished, strict=True)
    ]


def drawn(rollout: Rollout) -> list[Drawn]:
    """The prompt and the completion of every row as one sequence of tokens."""
    prompts, widths = rollout.prompts.tokens.tolist(), rollout.prompts.lengths.tolist()
    tokens, lengths, finished = rollout.tokens.tolist(), rollout.lengths.tolist(), rollout.finished.tolist()
    return [
        Drawn(tokens=(*prompt[:width], *row[:length]), finished=ended)
        for prompt, width, row, length, ended in zip(prompts, widths, tokens, lengths, finished, strict=True)
    ]
