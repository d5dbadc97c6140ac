"""Headers and indexes that are JSON, or nearly, and say something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from faults import checkpoint_values as values
from faults.checkpoint_folders import LAYOUT

from areno_fn.ckpt.store import SINGLE

Json = dict[str, Any]
Edit = Callable[[Random, Json, str, str], None]
"""Changes one thing: `edit(random, header, name, other)`, where `other` is a name that is there."""


def header(random: Random, given: Json) -> tuple[bytes, str]:
    """The text of a header with a few things changed, and which."""
    told = _edited(random, given, list(given), _HEADER)
    text = json.dumps(given).encode()
    if random.random() < 0.1:
        text = text.replace(b'"shape"', b'"dtype"', 1)
    if random.random() < 0.1:
        text += random.choice([b" ", b"\0", b"\n", b"{}", b"," * 8])
    return text, told


def index(random: Random, given: Json, files: list[str]) -> tuple[bytes, str]:
    """The text of an index with a few things changed, and which; `files` are those of the folder."""
    weight_map = given["weight_map"] or dict.fromkeys(LAYOUT.source, SINGLE)
    given["weight_map"] = weight_map

    def place(random: Random, places: Json, name: str, other: str) -> None:
        places[name] = values.file_name(random, files)

    def everything(random: Random, places: Json, name: str, other: str) -> None:
        places.update(dict.fromkeys(places, values.file_name(random, files)))

    told = _edited(random, weight_map, list(weight_map), [place, place, place, everything, *_INDEX])
    if random.random() < 0.2:
        given[random.choice(("weight_map", "more"))] = random.choice([{}, [], None, "x", {"a": 1}, list(weight_map)])
    if random.random() < 0.2:
        given["metadata"] = values.metadata(random)
    text = json.dumps(given).encode()
    if random.random() < 0.1:
        text = text.replace(b'"weight_map": {', b'"weight_map": {"model.norm.weight": "model.safetensors", ', 1)
    return text, told


def _edited(random: Random, given: Json, names: list[str], edits: list[Edit]) -> str:
    told = []
    for _ in range(random.randrange(1, 4)):
        edit, name = random.choice(edits), values.name(random, names)
        edit(random, given, name, random.choice(names))
        told.append(f"{edit.__name__} {name[:40]!r}")
    return ", ".join(told)


def _set_value(random: Random, given: Json, name: str, other: str) -> None:
    given[name] = values.value(random)


def _remove(random: Random, given: Json, name: str, other: str) -> None:
    given.pop(name, None)


def _rename(random: Random, given: Json, name: str, other: str) -> None:
    given[name] = given.pop(other, None)


def _copy(random: Random, given: Json, name: str, other: str) -> None:
    given[name] = json.loads(json.dumps(given.get(other)))


def _exchange(random: Random, given: Json, name: str, other: str) -> None:
    if name in given and other in given:
        given[name], given[other] = given[other], given[name]


def _metadata(random: Random, given: Json, name: str, other: str) -> None:
    given["__metadata__"] = values.metadata(random)


def _field(key: str, draw: Callable[[Random], Any]) -> Edit:
    def edit(random: Random, given: Json, name: str, other: str) -> None:
        if isinstance(given.get(other), dict):
            given[other][key] = draw(random)

    edit.__name__ = f"field {key}"
    return edit


def _move(random: Random, given: Json, name: str, other: str) -> None:
    """The bytes of a tensor begin or end somewhere else, by a little."""
    entry = given.get(other)
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(entry, dict) and isinstance(offsets, list) and len(offsets) == 2 and _are_integers(offsets):
        start, stop = offsets
        by = random.choice((-8, -4, -1, 1, 4, 8))
        entry["data_offsets"] = random.choice([[start + by, stop + by], [start, stop + by], [stop, start]])


def _are_integers(numbers: list[Any]) -> bool:
    return all(type(number) is int for number in numbers)


_HEADER: list[Edit] = [
    _set_value, _remove, _rename, _copy, _exchange, _metadata, _move, _field("shape", values.shape),
    _field("data_offsets", values.shape), _field("data_offsets", lambda random: [values.number(random), values.number(random)]),
    _field("dtype", lambda random: random.choice(values.DTYPES)), _field("shape", values.value), _field("more", values.value),
]  # fmt: skip
_INDEX: list[Edit] = [_set_value, _remove, _rename, _copy, _exchange]
