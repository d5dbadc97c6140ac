"""Work that makes much and throws away little, during which nobody looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it Python's search for cycles is off, as it may have been before; also a decorator.

    The search goes through all that is there whenever that has grown by a quarter: of a million rows, which hold no cycles and
    stay, it took as long as making them.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()
