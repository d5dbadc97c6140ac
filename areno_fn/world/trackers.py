"""Where metrics go: a JSONL file, TensorBoard, or several places at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from areno_fn.world.clock import Clock, wall
from areno_fn.world.jsonl_log import JsonlLog, truncate

__all__ = ["JsonlTracker", "TensorBoardTracker", "Tracker", "combine", "truncate"]


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Records metrics by their names in the metric table; `step` counts over the whole run."""
        ...

    def close(self) -> None:
        """Finishes writing."""
        ...


class JsonlTracker:
    """One line `{"step", "phase", "time", ...metrics}` a call, appended. To continue a run, `truncate` the file first."""

    def __init__(self, path: str | os.PathLike[str], clock: Clock = wall) -> None:
        self._log = JsonlLog(path)
        self._clock = clock

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Appends a line; what is not finite becomes null."""
        self._log.append({"step": step, "phase": phase, "time": self._clock(), **metrics})

    def close(self) -> None:
        """Closes the file."""
        self._log.close()


class TensorBoardTracker:
    """TensorBoard event files.

    Args:
        folder: where they go.
        after_step: the step that a run continues from; TensorBoard then hides what was logged for later ones.
    """

    def __init__(self, folder: str | os.PathLike[str], after_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, for those who want it

        purge = None if after_step is None else after_step + 1
        self._writer = SummaryWriter(log_dir=os.fspath(folder), purge_step=purge)

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Writes a scalar for each metric; TensorBoard has no place for the phase."""
        del phase
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def picture(self, step: int, name: str, picture: np.ndarray[Any, Any]) -> None:
        """Writes a picture, float [C, H, W] from 0 to 1."""
        self._writer.add_image(name, picture, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def combine(*trackers: Tracker) -> Tracker:
    """A tracker that passes everything on to each of these, in order."""
    return _Combined(trackers)


class _Combined:
    def __init__(self, trackers: tuple[Tracker, ...]) -> None:
        self._trackers = trackers

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, phase, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
