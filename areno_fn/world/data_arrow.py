"""Rows of Parquet files and of the Arrow streams that `datasets` saves. pyarrow is imported here, when it is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areno_fn.contracts.errors import DataError
from areno_fn.world.data_row import Row
from areno_fn.world.regular_files import require_regular

_SOME = 1024
"""Rows that are turned into plain values at once."""


def parquet_rows(path: str) -> Iterator[Row]:
    """The rows of a Parquet file, read a thousand at a time; a null, inside a list or struct too, is no key.

    Raises:
        DataError: pyarrow is not installed, or the file cannot be read.
    """
    from_disk = _pyarrow(path)
    return _rows(path, "Parquet", from_disk, lambda arrow, file: arrow.parquet.ParquetFile(file).iter_batches(_SOME))


def arrow_rows(path: str) -> Iterator[Row]:
    """The rows of an Arrow stream, as `datasets` writes them in `save_to_disk`.

    Raises:
        DataError: as `parquet_rows`.
    """
    return _rows(path, "Arrow", _pyarrow(path), lambda arrow, file: _pieces(arrow.ipc.open_stream(file)))


def _rows(path: str, kind: str, arrow: Any, batches: Callable[[Any, Any], Iterator[Any]]) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        number = 0
        try:
            require_regular(Path(path))
            file = stack.enter_context(arrow.memory_map(path))
            for batch in batches(arrow, file):
                batch.validate(full=True)  # offsets of a damaged stream may lead outside it
                for values in batch.to_pylist():
                    number += 1
                    yield Row(_without_nulls(values), path, number)
        except (OSError, ValueError, arrow.ArrowException) as error:
            said = " ".join(str(error).split())
            raise DataError(
                f"the data file {path} cannot be read behind its row {number} ({said}); give a whole {kind} file"
            ) from None


def _pieces(stream: Any) -> Iterator[Any]:
    for batch in stream:
        for start in range(0, batch.num_rows, _SOME):
            yield batch.slice(start, _SOME)


def _without_nulls(value: Any) -> Any:
    """A table says null where a row has no such key, down to the turns of a conversation."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"the data file {path} needs pyarrow to be read ({error}); install it with: pip install 'areno-fn[data]'"
        ) from None
    return pyarrow
