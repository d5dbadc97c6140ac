"""`read`: the rows that a specification names, from a JSONL file or generated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from areno_fn.contracts import spec as specs
from areno_fn.contracts.errors import DataError
from areno_fn.world import arithmetic
from areno_fn.world.data_row import Row
from areno_fn.world.data_schema import require_schema


def read(spec: specs.DataSpec) -> list[Row]:
    """The rows of one data set, in the order of its lines.

    Raises:
        DataError: no such file, no rows, a line that is not a JSON object, or a row that fits no schema.
    """
    if isinstance(spec, specs.ArithmeticData):
        return arithmetic.rows(spec)
    return read_jsonl(spec.path)


def read_all(sources: Iterable[specs.DataSpec]) -> list[Row]:
    """The rows of several data sets, one after the other."""
    return [row for source in sources for row in read(source)]


def read_jsonl(path: str) -> list[Row]:
    """The rows of a file with one JSON object a line; empty lines are passed over.

    Raises:
        DataError: as `read`.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"the data file {path} cannot be read ({reason}); give the path of a JSONL file") from None
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = [_row(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError(f"the data file {path} is empty; it needs one JSON object a line")
    return rows


def _row(line: bytes, path: str, number: int) -> Row:
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not valid JSON ({error}); each line is one JSON object") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: a row must be a JSON object, received {type(value).__name__}")
    row = Row(value, path, number)
    require_schema(row)
    return row
