"""Fields of specifications as places in plain data: where they are, and other values that their types admit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from areno_fn.engine.specfile.types import choose, root

Place = tuple[str | int, ...]


def places(info: inspect.Type, raw: Any, at: Place = ()) -> Iterator[tuple[Place, inspect.Type]]:
    """Every field of a table and of the tables in it, with its type."""
    if isinstance(raw, dict):
        for member in choose(info, raw):
            for field in member.fields:
                yield (*at, field.name), field.type
                yield from places(field.type, raw.get(field.name), (*at, field.name))
    if isinstance(raw, list) and isinstance(info, inspect.ListType):
        for index, item in enumerate(raw):
            yield from places(info.item_type, item, (*at, index))


def value_at(raw: Any, place: Place) -> Any:
    for key in place:
        raw = raw[key]
    return raw


def changed(raw: Any, place: Place, value: Any) -> Any:
    """A copy of plain data with another value in a place."""
    found = copy.deepcopy(raw)
    value_at(found, place[:-1])[place[-1]] = value
    return found


def dotted(place: Place) -> str:
    return ".".join(map(str, place))


def numbers(plain: Any) -> list[tuple[Place, inspect.Type]]:
    """The places of all numbers of a specification, those in lists too."""
    found: list[tuple[Place, inspect.Type]] = []
    for place, info in places(root(), plain):
        inner: list[tuple[Place, inspect.Type]] = [(place, info)]
        if isinstance(info, inspect.TupleType):
            inner = [((*place, index), item) for index, item in enumerate(info.item_types)]
        elif isinstance(info, inspect.ListType) and value_at(plain, place):
            inner = [((*place, 0), info.item_type)]
        found += [(at, item) for at, item in inner if isinstance(item, inspect.IntType | inspect.FloatType)]
    return found
