"""Lists of names or numbers in which one stands twice, which can mean nothing more: decided before a file is opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.specfile.types import Path, locate, plain_copy

_FREE = ("model", "config")
"""The table that belongs to a family, whose lists may say the same of several layers."""


def repeat_problems(spec: RunSpec) -> Iterator[str]:
    """A sentence for everything that is named again in one list."""
    plain = plain_copy(spec)
    for path, item in _again(plain, ()):
        yield f"{locate(plain, path)[0]}: {item!r} is there twice; name it once"


def _again(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if path == _FREE:
        return
    if isinstance(value, list):
        named = [(place, item) for place, item in enumerate(value) if isinstance(item, str | int)]
        seen = set[Any]()
        for place, item in named:
            if item in seen:
                yield (*path, place), item
            seen.add(item)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _again(item, (*path, key))
