"""The only place that reads a clock. Everything that needs time takes one of these functions as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds from some origin."""


def wall() -> float:
    """Seconds since 1970, as other programs count them."""
    return time.time()


def monotonic() -> float:
    """Seconds from an arbitrary origin, never set back: for durations."""
    return time.monotonic()


class Stopwatch:
    """Measures durations from the moment it is made."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._start = self._lap = clock()

    def seconds(self) -> float:
        """Seconds since the watch was made."""
        return self._clock() - self._start

    def lap(self) -> float:
        """Seconds since the last lap, or since the watch was made; starts the next lap."""
        last, self._lap = self._lap, self._clock()
        return self._lap - last
