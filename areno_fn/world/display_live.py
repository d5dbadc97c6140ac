"""The display on a terminal: a bar for each phase, the latest figures under them, everything else scrolls above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from areno_fn.world.clock import Clock, monotonic
from areno_fn.world.display_text import evaluation_figures, figures, sample_line
from areno_fn.world.samples import Sample


class LiveDisplay:
    """Redraws a few times a second until it is closed."""

    def __init__(self, console: Console, clock: Clock = monotonic) -> None:
        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(*columns, console=console, get_time=clock, expand=True)
        self._console = console
        self._figures = Text()
        self._task: TaskID | None = None
        self._name, self._total, self._step = "", 0, 0
        self._live = Live(self._view(), console=console, refresh_per_second=4)
        self._live.start()

    def loading(self, what: str) -> Callable[[int, int], None]:
        """A bar that goes away when it is full."""
        task = self._progress.add_task(what, total=None)

        def progress(done: int, total: int) -> None:
            self._progress.update(task, completed=done, total=total)
            if done == total:
                self._progress.remove_task(task)
                self.message(f"{what} {done}/{total}")

        return progress

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Adds a bar; those of earlier phases stay."""
        self._name, self._total, self._step = name, total, done
        self._task = self._progress.add_task(name, total=total, completed=done)
        self._show({})

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar and shows the figures."""
        self._step = step
        if self._task is not None:
            self._progress.update(self._task, completed=step)
        self._show(figures(metrics))

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Prints the results above the bars."""
        line = Text.assemble((f"{self._name} {self._step}/{self._total}", "bold"), (" eval", "cyan"))
        for name, value in evaluation_figures(metrics).items():
            line.append(f" {name}=", style="dim").append(value, style="bold cyan")
        self._console.print(line)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Prints each completion above the bars."""
        for sample in samples:
            self._console.print(Text(f"  {sample_line(sample)}", style="green" if sample.reward > 0 else "dim"))

    def message(self, text: str) -> None:
        """Prints a line above the bars."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Stops redrawing; the last picture stays."""
        self._live.stop()

    def _show(self, shown: Mapping[str, str]) -> None:
        self._figures = Text("  ")
        for name, value in shown.items():
            self._figures.append(f"{name}=", style="dim").append(
                f"{value}  "
            )  # no space inside: lines break between them
        self._live.update(self._view())

    def _view(self) -> Group:
        return Group(self._progress, self._figures)
