"""Sheets of pictures that a run draws on the way: one class a row, from the same keys each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areno_fn.world.pictures import Picture, grid, subjects, write_png


class Gallery:
    """PNG files `step-00000100.png`, and the same in TensorBoard where that is wanted.

    Args:
        folder: where the files go; it is made when the first one is written.
        track: `(step, name, picture)`, told of every sheet too.
    """

    def __init__(
        self, folder: str | os.PathLike[str], track: Callable[[int, str, Picture], None] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._track = track

    def hang(self, step: int, name: str, rows: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]) -> None:
        """Writes the sheet of an evaluation.

        Args:
            step: counted over the whole run.
            name: "eval"; any other stands in the name of the file.
            rows: what the pictures are of, a `label` or a `prompt`.
            pictures: float32 [C, S, S], from 0 to 1.
        """
        sheet = grid(subjects(rows), pictures)
        self._folder.mkdir(parents=True, exist_ok=True)
        ending = "" if name == "eval" else f"-{name.removeprefix('eval_')}"
        final = self._folder / f"step-{step:08d}{ending}.png"
        beside = final.with_suffix(".partial")
        write_png(sheet, beside)
        beside.replace(final)
        if self._track is not None:
            self._track(step, f"{name}/pictures", sheet)
