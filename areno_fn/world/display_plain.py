"""Lines for logs and pipes: `phase step/total name=value ...`, one every few seconds at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from areno_fn.world.clock import Clock, monotonic
from areno_fn.world.display_text import duration, evaluation_figures, figures, sample_line
from areno_fn.world.samples import Sample


class PlainDisplay:
    """Prints the first and the last step of a phase, and in between at most one step every `pause` seconds."""

    def __init__(self, stream: TextIO, clock: Clock = monotonic, pause: float = 5.0) -> None:
        self._stream = stream
        self._clock = clock
        self._pause = pause
        self._name, self._step, self._total = "", 0, 0
        self._start_time = self._last = clock()
        self._start_step, self._begun = 0, False

    def loading(self, what: str) -> Callable[[int, int], None]:
        """A callback that prints how far it is, with the same pause as steps, and when it is done."""
        last = self._clock()

        def progress(done: int, total: int) -> None:
            nonlocal last
            if done == total or self._clock() - last >= self._pause:
                last = self._clock()
                self.message(f"{what} {done}/{total}")

        return progress

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Starts counting the steps of a phase."""
        self._name, self._step, self._total, self._begun = name, done, total, False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a step, or not."""
        now = self._clock()
        first, self._step = not self._begun, step
        if first:  # what the first step prepares, and evaluations before it, say nothing of the others
            self._begun, self._start_step, self._start_time = True, step, now
        if first or step == self._total or now - self._last >= self._pause:
            self._last = now
            pace = (now - self._start_time) / max(1, step - self._start_step)
            left = {} if first and step < self._total else {"eta": duration(pace * (self._total - step))}
            self._print({**figures(metrics), **left})

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Prints the results."""
        self._print(evaluation_figures(metrics), "eval ")

    def samples(self, samples: Sequence[Sample]) -> None:
        """Prints each completion on a line."""
        for sample in samples:
            self.message(f"{self._place()} sample {sample_line(sample)}")

    def message(self, text: str) -> None:
        """Prints a line; characters that the stream cannot encode are escaped."""
        encoding = self._stream.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is left to do."""

    def _place(self) -> str:
        return f"{self._name} {self._step}/{self._total}"

    def _print(self, shown: Mapping[str, str], kind: str = "") -> None:
        values = " ".join(f"{name}={value}" for name, value in shown.items())
        self.message(f"{self._place()} {kind}{values}".rstrip())
