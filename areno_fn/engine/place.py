"""Where in a specification a mistake is, for errors of parts that do not know what asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areno_fn.contracts.errors import ArenoError


@contextmanager
def at(place: str) -> Iterator[None]:
    """Within it, a user's mistake is reported with the field of the specification that led to it in front."""
    try:
        yield
    except ArenoError as error:
        raise type(error)(f"{place}: {error}") from error
