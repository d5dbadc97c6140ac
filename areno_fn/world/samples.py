"""Completions worth a look: what was asked, what came back, and what it was worth."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from areno_fn.world.jsonl_log import JsonlLog, truncate

__all__ = ["Sample", "SampleLog", "truncate"]


@attrs.frozen(kw_only=True)
class Sample:
    """One completion or picture.

    Attributes:
        prompt: text that was continued, or what was drawn for.
        completion: text that came back, or a few words on a picture.
        reward: what it was judged to be worth.
        answer: what would have been right, where the row says so.
    """

    prompt: str
    completion: str
    reward: float
    answer: str | None = None


class SampleLog:
    """Appends samples to a JSONL file. To continue a run, `truncate` the file first.

    Args:
        path: of the file.
        what: the samples are, the name of their field there.
    """

    def __init__(self, path: str | os.PathLike[str], what: str = "completion") -> None:
        self._log, self._what = JsonlLog(path), what

    def log(self, step: int, phase: str, samples: Sequence[Sample]) -> None:
        """Appends a line `{"step", "phase", "prompt", "completion", "reward", "answer"}` for each sample."""
        for sample in samples:
            fields = {
                self._what if name == "completion" else name: value for name, value in attrs.asdict(sample).items()
            }
            self._log.append({"step": step, "phase": phase, **fields})

    def close(self) -> None:
        """Closes the file."""
        self._log.close()
