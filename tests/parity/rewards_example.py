"""Rewards for a run on a real model: `python -m areno_fn.run specs/grpo.toml --set phases.grpo.rewards.0.function=...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FREE_WORDS = 10


def right_and_short(rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    """1 for a completion that holds the row's answer, less 0.02 for every word beyond the tenth, and at least -0.5."""
    rewards = []
    for row, completion in zip(rows, completions, strict=True):
        right = float(str(row["answer"]).lower() in completion.lower())
        wordy = max(0, len(completion.split()) - FREE_WORDS)
        rewards.append(right - min(0.5, 0.02 * wordy))
    return rewards
