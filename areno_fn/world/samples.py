"""Completions worth a look: what was asked, what came back, and what it was worth."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from areno_fn.world.jsonl_log import JsonlLog, truncate

__all__ = ["Sample", "SampleLog", "truncate"]


@attrs.frozen(kw_only=True)
class Sample:
    """One completion.

    Attributes:
        prompt: text that was continued.
        completion: text that came back.
        reward: what it was judged to be worth.
        answer: what would have been right, where the row says so.
    """

    prompt: str
    completion: str
    reward: float
    answer: str | None = None


class SampleLog:
    """Appends completions to a JSONL file. To continue a run, `truncate` the file first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._log = JsonlLog(path)

    def log(self, step: int, phase: str, samples: Sequence[Sample]) -> None:
        """Appends a line `{"step", "phase", "prompt", "completion", "reward", "answer"}` for each sample."""
        for sample in samples:
            self._log.append({"step": step, "phase": phase, **attrs.asdict(sample)})

    def close(self) -> None:
        """Closes the file."""
        self._log.close()
