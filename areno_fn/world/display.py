"""What a person sees while a run goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TextIO

from rich.console import Console

from areno_fn.world.clock import Clock, monotonic
from areno_fn.world.display_live import LiveDisplay
from areno_fn.world.display_plain import PlainDisplay
from areno_fn.world.samples import Sample

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "open_display"]


class Display(Protocol):
    """Shows a run. Steps are counted within their phase."""

    def loading(self, what: str) -> Callable[[int, int], None]:
        """A callback `(done, total)` that shows how far something has been read or written."""
        ...

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of `total` steps begins, or goes on after `done` of them."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step of the current phase is done; metrics go by their names in the metric table."""
        ...

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """An evaluation is done; names begin with `eval/`."""
        ...

    def samples(self, samples: Sequence[Sample]) -> None:
        """Completions to look at."""
        ...

    def message(self, text: str) -> None:
        """Something worth a line."""
        ...

    def close(self) -> None:
        """Leaves the terminal as it was found."""
        ...


def open_display(stream: TextIO | None = None, clock: Clock = monotonic) -> Display:
    """The display that suits a stream: live on a terminal that can move its cursor, plain otherwise.

    Args:
        stream: standard output when omitted.
        clock: for rates, remaining time, and the pause between plain lines.
    """
    target = sys.stdout if stream is None else stream
    console = Console(file=target)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, clock)
    return PlainDisplay(target, clock)
