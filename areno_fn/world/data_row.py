"""`Row`: one row of a data set, which remembers where it stands so that every complaint can name the place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final


@final
class Row(dict[str, Any]):
    """The plain values of a row by key, with the file and the line they come from.

    Attributes:
        file: the file's path, or a description of generated data.
        line: 1-based line of the file.
    """

    __slots__ = ("file", "line")

    def __init__(self, values: Mapping[str, Any], file: str, line: int) -> None:
        super().__init__(values)
        self.file = file
        self.line = line

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"
