"""How values and lists of faults from outside are shown in a message: whole where they are short, cut where not."""

from __future__ import annotations

from collections.abc import Sequence

from areno_fn.contracts.errors import CheckpointError

MOST_SHOWN = 20


def brief(value: object, most: int = 200) -> str:
    """The `repr` of a value, cut where a file made it absurdly long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def listed(problems: Sequence[str], most: int = MOST_SHOWN) -> str:
    """Every problem, or the first `most` and how many there are in all."""
    rest = len(problems) - most
    return "; ".join(problems) if rest <= 0 else f"{'; '.join(problems[:most])}; and {rest} more like the last"


def encoded(text: str, what: str) -> bytes:
    """A text as it stands in a file.

    Raises:
        CheckpointError: it holds half of a surrogate pair, which no file can; `what` names it.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{what} would hold {brief(text[max(error.start - 40, 0) : error.end])}, which is no valid text"
        ) from None
