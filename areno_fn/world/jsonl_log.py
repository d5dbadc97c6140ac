"""Logs of one JSON object a line that survive a kill: nothing is half written but the last line, and that is mended.

Every line has a `step`, counted over the whole run, and the name of its `phase`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from areno_fn.contracts.errors import DataError


class JsonlLog:
    """Appends objects to a file, each in one write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - it stays open until close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes one line; a number that is not finite becomes null, because JSON has none."""
        data = msgspec.json.encode(line) + b"\n"
        while data:  # a disk that is nearly full takes a part
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Closes the file; nothing can be appended after that."""
        self._file.close()


def truncate(path: str | os.PathLike[str], after_step: int, phases: Collection[str] | None = None) -> None:
    """Drops what a continued run will write again, and a last line that was cut off.

    Args:
        path: a log; nothing happens when there is none.
        after_step: the step that the run continues from; lines of later steps go.
        phases: when given, lines of any other phase go too. A phase is evaluated before its first step, which is
            the last step of the phase before it.

    Raises:
        DataError: a line before the last is not one of this log.
    """
    source = Path(path)
    if not source.exists():
        return
    *whole, _torn = source.read_bytes().split(b"\n")
    kept = [line for number, line in enumerate(whole, 1) if _stays(line, after_step, phases, f"{source}:{number}")]
    beside = source.with_name(source.name + ".part")
    beside.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(beside, source)


class _Head(msgspec.Struct):
    step: int
    phase: str


def _stays(line: bytes, after_step: int, phases: Collection[str] | None, where: str) -> bool:
    try:
        head = msgspec.json.decode(line, type=_Head)
    except msgspec.DecodeError:
        raise DataError(
            f"{where} is not a JSON object with a step and a phase; remove the line to continue the run"
        ) from None
    return head.step <= after_step and (phases is None or head.phase in phases)
