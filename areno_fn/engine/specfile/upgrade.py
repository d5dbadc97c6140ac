"""Specifications of older releases in the words of this one: plain data to plain data, one version after the other.

An upgrade knows its own two versions only. What it does not understand it leaves as it is, so that a mistake in an old
file gets the sentence that it gets in a new one; so it does with what is already said as the later version says it.

A field that is new, with a default under which runs do what they did, needs no version. A default that changes does: the
upgrade writes the old one where nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Plain = dict[str, Any]

FIRST = 1
"""The version of a file that names none: the first releases did not ask for it."""


def version_of(raw: Plain) -> Any:
    """What a specification gives as its version."""
    return raw.get("version", FIRST)


def upgraded(raw: Plain) -> Plain:
    """A specification of a version in `READABLE` in the version of this release; `raw` stays as it is."""
    return {**rewritten(raw, version_of(raw)), "version": READABLE[-1]}


def rewritten(raw: Plain, version: int) -> Plain:
    """The same with every setting as this release writes it, where some are still as `version` has them."""
    for step in range(version, READABLE[-1]):
        raw = UPGRADES[step](raw)
    return raw


def from_1(raw: Plain) -> Plain:
    """Version 1 knew one kind of reward, and its first releases one kind of optimizer, so neither had to be named.

    A phase that stops at no score could then say so with nothing instead of 0.
    """
    new = dict(raw)
    if isinstance(raw.get("phases"), list):
        phases = [_without_nothing(phase, "stop_at") for phase in raw["phases"]]
        new["phases"] = [_named(phase, rewards="function", optimizers="adamw") for phase in phases]
    if "evaluation" in raw:
        new["evaluation"] = _named(raw["evaluation"], rewards="function")
    return new


UPGRADES: Mapping[int, Callable[[Plain], Plain]] = {1: from_1}
"""By the version that it starts from, what leads to the next one."""

READABLE = (*UPGRADES, max(UPGRADES) + 1)
"""The versions that this release reads; it writes the last."""


def _named(table: Any, **kinds: str) -> Any:
    """A table in whose lists every item without a kind has got one."""
    if not isinstance(table, dict):
        return table
    return {name: _items(value, kinds[name]) if name in kinds else value for name, value in table.items()}


def _items(items: Any, kind: str) -> Any:
    if not isinstance(items, list):
        return items
    return [{"kind": kind, **item} if isinstance(item, dict) and "kind" not in item else item for item in items]


def _without_nothing(table: Any, name: str) -> Any:
    absent = isinstance(table, dict) and table.get(name, "") is None
    return {key: value for key, value in table.items() if key != name} if absent else table
