"""What a benchmark needs of a machine: said in one sentence, with exit code 2, before anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from areno_fn.command import main as command
from areno_fn.contracts.errors import ArenoError


class NeedsError(ArenoError):
    """The machine or the command line lacks what was asked for."""


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process as every command of the library ends: a mistake is a sentence and exit code 2."""
    sys.exit(command(lambda _: main()))


def gpu(what: str, instead: str = "") -> None:
    """Refuses to go on without a CUDA device.

    Args:
        what: what is to be measured, as the subject of the sentence.
        instead: what would run here.

    Raises:
        NeedsError: torch sees no device.
    """
    import torch  # what needs no device starts without it

    if not torch.cuda.is_available():
        raise NeedsError(f"{what} needs a CUDA device, and torch sees none{instead and f'; {instead}'}")


def room(shape: str, option: str) -> None:
    """Refuses a shape that a CPU would not end with.

    Raises:
        NeedsError: it is not the tiny one, and torch sees no CUDA device.
    """
    if shape != "tiny":
        gpu(
            f"{option} {shape}",
            f"{option} tiny runs on a CPU, with fewer and shorter rows where there are options for them",
        )


def package(name: str, what: str, install: str) -> None:
    """Refuses to go on without a package.

    Raises:
        NeedsError: it is not installed.
    """
    if find_spec(name) is None:
        raise NeedsError(f"{what} needs the package {install}, which is not installed; pip install {install}")


def folder(path: str | Path | None, option: str) -> None:
    """Refuses a folder in which nothing can be made.

    Raises:
        NeedsError: it is not there.
    """
    if path is not None and not Path(path).is_dir():
        raise NeedsError(f"{option} {path} is not a folder; make it first, or name another")


def gigabytes(value: float | None) -> str:
    """An amount of memory in a column, which on a CPU is not measured."""
    return "not measured" if value is None else f"{value:6.2f} GB"


def tflops(rate: float) -> str:
    """A rate of floating operations, with three digits."""
    return f"{rate / 1e12:.3g} TFLOP/s"
