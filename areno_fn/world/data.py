"""`read`: the rows that a specification names, from files of several sorts or generated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from areno_fn.contracts import spec as specs
from areno_fn.contracts.errors import DataError
from areno_fn.world import arithmetic, digits
from areno_fn.world.data_arrow import arrow_rows, parquet_rows
from areno_fn.world.data_folder import files_of
from areno_fn.world.data_row import Row
from areno_fn.world.data_schema import require_schema
from areno_fn.world.regular_files import require_regular


def read(spec: specs.DataSpec, source: str = "") -> list[Row]:
    """The rows of one data set, in the order of its lines.

    Args:
        source: what its rows are to say they come from.

    Raises:
        DataError: no such file, no rows, a line that is not a JSON object, a column that is not there or that would take the
            place of another, or a row that fits no schema; rows behind the limit are not looked at.
    """
    if isinstance(spec, specs.ArithmeticData):
        return _of(source, arithmetic.rows(spec))
    if isinstance(spec, specs.DigitsData):
        return _of(source, digits.rows(spec))
    if isinstance(spec, specs.DigitPairsData):
        return _of(source, digits.pairs(spec))
    rows = []
    for row in islice(_stored(spec), spec.limit or None):
        named = Row(_renamed(row, spec.columns), row.file, row.line) if spec.columns else row
        require_schema(named)
        rows.append(named)
    if not rows:
        sort = "folder" if isinstance(spec, specs.HFData) else "file"
        needed = "one JSON object a line" if isinstance(spec, specs.JsonlData) else "at least one row"
        raise DataError(f"the data {sort} {spec.path} is empty; it needs {needed}")
    return _of(source, rows)


def read_all(sources: Sequence[specs.DataSpec]) -> list[Row]:
    """The rows of several data sets, one after the other; each row says which one it is from."""
    return [row for name, spec in zip(source_names(sources), sources, strict=True) for row in read(spec, name)]


def source_names(sources: Iterable[specs.DataSpec]) -> list[str]:
    """What the rows of every data set say they come from: its name, or its place in the list."""
    return [spec.name or str(place) for place, spec in enumerate(sources)]


def read_jsonl(path: str) -> list[Row]:
    """The rows of a file with one JSON object a line; empty lines are passed over.

    Raises:
        DataError: as `read`.
    """
    return read(specs.JsonlData(path=path))


def _of(source: str, rows: list[Row]) -> list[Row]:
    """Rows that have just been made and are nobody else's, which say from now on what they come from."""
    for row in rows:
        row.source = source
    return rows


def _stored(spec: specs.StoredData) -> Iterator[Row]:
    if isinstance(spec, specs.ParquetData):
        return parquet_rows(spec.path)
    if isinstance(spec, specs.HFData):
        return (row for file in files_of(spec.path, spec.split) for row in _READERS[file.suffix](str(file)))
    return _jsonl_rows(spec.path)


def _renamed(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    missing = [theirs for theirs in columns.values() if theirs not in row]
    if missing:
        raise DataError(
            f"{row.where}: there is no {missing[0]!r} for `columns` to rename; the row has {', '.join(sorted(row)) or 'no keys'}"
        )
    kept = {key: value for key, value in row.items() if key not in columns.values()}
    for wanted, theirs in columns.items():
        if wanted in kept:
            raise DataError(
                f"{row.where}: `columns` would put {theirs!r} in the place of {wanted!r}, which the row has too; it is written "
                f"{{ wanted = 'theirs' }}: turn it round, or rename {wanted!r} too to keep it"
            )
    return kept | {wanted: row[theirs] for wanted, theirs in columns.items()}


def _jsonl_rows(path: str) -> Iterator[Row]:
    try:
        require_regular(Path(path))
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"the data file {path} cannot be read ({reason}); give the path of a JSONL file") from None
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return (_row(line, path, number) for number, line in enumerate(lines, start=1) if line.strip())


def _row(line: bytes, path: str, number: int) -> Row:
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise DataError(f"{path}:{number}: not valid JSON ({reason}); {_advice(line, reason)}") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"{path}:{number}: a row must be a JSON object, received {kind}; each line is one JSON object")
    return Row(value, path, number)


def _advice(line: bytes, reason: str) -> str:
    """What would be right, of the mistakes that are often made."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file seems to be UTF-16; write it in UTF-8"
    place = re.search(r"\(byte (\d+)\)$", reason)
    if place and re.match(rb"(NaN|Infinity)\b", line[int(place[1]) :]):
        return "JSON has no NaN and no Infinity; write null, or leave the key out"
    if line.strip() in (b"{", b"["):
        return "the object goes on in the next line; each line is one JSON object, whole"
    return "each line is one JSON object"


_READERS = {".jsonl": _jsonl_rows, ".parquet": parquet_rows, ".arrow": arrow_rows}
