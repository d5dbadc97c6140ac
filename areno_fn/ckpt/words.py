"""How values and lists of faults from outside are shown in a message: whole where they are short, cut where not."""

from __future__ import annotations

from collections.abc import Sequence

MOST_SHOWN = 20


def brief(value: object, most: int = 200) -> str:
    """The `repr` of a value, cut where a file made it absurdly long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def listed(problems: Sequence[str], most: int = MOST_SHOWN) -> str:
    """Every problem, or the first `most` and how many there are in all."""
    rest = len(problems) - most
    return "; ".join(problems) if rest <= 0 else f"{'; '.join(problems[:most])}; and {rest} more like the last"
