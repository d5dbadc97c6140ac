"""`Row`: one row of a data set, which remembers where it stands so that every complaint can name the place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final


@final
class Row(dict[str, Any]):
    """The plain values of a row by key, with the file and the line they come from.

    Attributes:
        file: the file's path, or a description of generated data.
        line: 1-based line of the file, or number of the row where a file has no lines.
        source: the data set, by its name or its place in the list of them; rewards may judge some sets only.
    """

    __slots__ = ("file", "line", "source")

    def __init__(self, values: Mapping[str, Any], file: str, line: int, source: str = "") -> None:
        super().__init__(values)
        self.file = file
        self.line = line
        self.source = source

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"
