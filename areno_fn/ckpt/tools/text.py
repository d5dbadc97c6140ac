"""Sizes, counts, specs and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from areno_fn.ckpt.header import DTYPE_NAMES
from areno_fn.contracts.layout import TensorSpec


def size(count: int) -> str:
    """Bytes in a unit that leaves at most four digits before the point: `812 B`, `1.24 GB`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def amount(count: int) -> str:
    """A number of parameters: `812`, `135 M`."""
    return _scaled(count, ("", "K", "M", "B", "T")).rstrip()


def many(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def spec(value: TensorSpec) -> str:
    """`BF16 [4, 8]`, the dtype by its name in files."""
    return f"{DTYPE_NAMES[value.dtype]} {list(value.shape)}" if value.dtype else str(list(value.shape))


def first(items: Sequence[str], most: int) -> list[str]:
    """The first `most` lines and how many there are besides; all for 0."""
    if not most or len(items) <= most:
        return list(items)
    return [*items[:most], f"... and {len(items) - most} more"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines with columns as wide as what is in them; all but the last column are padded, columns of numbers on the left."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [
        all(cell[:1].isdigit() or cell[:1] in ("-", "+", "") or cell == "inf" for cell in column[1:])
        for column in columns
    ]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _scaled(count: int, units: Sequence[str]) -> str:
    value, place = float(count), 0
    while value >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.0f} {units[place]}" if place == 0 or value >= 99.95 else f"{value:.3g} {units[place]}"
