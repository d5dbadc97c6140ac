"""What is wrong with a specification, in one sentence: where, what stands there, and what would be right.

msgspec finds the fault; its message is used only for the place and the sort of fault. The words come from the value
at that place and from the type that belongs there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from msgspec import inspect

from areno_fn.engine.specfile.formats import kind_of
from areno_fn.engine.specfile.types import (
    Path,
    Type,
    child,
    describe,
    fields,
    homes,
    kinds,
    locate,
    misfit,
    one_of,
    strangers,
    structs,
)
from areno_fn.engine.specfile.yaml_text import number_in_yaml

_MESSAGE = re.compile(r"(?P<head>.*?)(?: - at `(?P<path>\$[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_FEW = 6
"""So many choices are read at a glance; of more the nearest one is named."""
_BOOLEANS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_NAMED = re.compile(r"(unknown|required) field `(.*)`")


def explain(message: str, raw: Any, suffix: str) -> tuple[Path, str]:
    """Says what msgspec found wrong with `raw`.

    Args:
        message: the text of a `msgspec.ValidationError`.
        raw: the plain data that was converted.
        suffix: the file format it came from, for advice on spelling; "" for none.

    Returns:
        The place as keys and indices, and the sentence without the file's name.
    """
    match = _MESSAGE.fullmatch(message)
    head, place = (match["head"], match["path"] or "$") if match else (message, "$")
    path: Path = tuple(name or int(index) for name, index in _STEP.findall(place))
    where, value, info = locate(raw, path)
    named = _NAMED.search(head)
    if named is None and isinstance(value, dict):  # msgspec does not say under which key of a plain table
        path = (*path, *misfit(info, value))
        where, value, info = locate(raw, path)
    if named is None:
        return (
            path,
            f"{where or 'a specification'} must be {describe(info)}, received {kind_of(value)}{_advice(info, value, suffix)}",
        )
    sort, name = named.groups()
    if sort == "required":
        return (
            path,
            f"{where or 'the specification'} lacks {name!r}, which must be {describe(child(info, value, name))}",
        )
    return (*path, name), unknown_field(raw, path, name)


def unknown_field(raw: Any, path: Path, name: str) -> str:
    """The table at `path` has no such field: what to do with it, the table that has it, the closest one, or all there are."""
    where, value, info = locate(raw, path)
    known = fields(info, value)
    advice = _inside(where, name, known) or _home(name, path) or suggestion(name, known) or _listing(known)
    return _other_kinds(raw, path, name) or f"{where or 'the specification'} has no field {name!r}; {advice}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`the nearest is 'x'`, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"the nearest is {near[0]!r}" if near else ""


def _other_kinds(raw: Any, path: Path, name: str) -> str:
    """That only other kinds of a table have the field, with all others there of which that is so."""
    depth = next((d for d in range(len(path), -1, -1) if kinds(locate(raw, path[:d])[2])), None)
    if depth is None:
        return ""
    where, value, info = locate(raw, path[:depth])
    wanted = (*path[depth:], name)
    if not isinstance(value, dict) or not _kinds_with(info, wanted):
        return ""
    others = [found for found in strangers(info, value) if found != wanted and _kinds_with(info, found)]
    names = [".".join(map(str, found)) for found in (wanted, *others)]
    having = [kind for kind in kinds(info) if all(kind in _kinds_with(info, found) for found in (wanted, *others))]
    advice = "remove them" if others else "remove it"
    choice = f", or take a kind that has {'them' if others else 'it'}, {one_of(having)}" if having else ""
    listed = one_of(names).replace(" or ", " and ")
    fields_ = f"fields {listed}" if others else f"field {listed}"
    return f"{where} has no {fields_}, as it is of kind {value.get('kind')!r}; {advice}{choice}"


def _kinds_with(info: Type, place: Path) -> list[str]:
    """The kinds of a table that have a field at a place in them."""

    def has(node: Type, rest: Path) -> bool:
        if not rest:
            return True
        return any(f.name == rest[0] and has(f.type, rest[1:]) for member in structs(node) for f in member.fields)

    return [str(member.tag) for member in structs(info) if has(member, place)]


def _inside(where: str, name: str, known: Mapping[str, Type]) -> str:
    """A table of this table that has the field."""
    inner = [key for key, own in known.items() if any(f.name == name for member in structs(own) for f in member.fields)]
    return f"a field of that name stands under {f'{where}.{inner[0]}'.lstrip('.')}" if inner else ""


def _home(name: str, path: Path) -> str:
    here = ".".join(str(key) for key in path if isinstance(key, str))
    found = [place for place in homes(name) if place != here]
    outermost = {place for place in found if not any(other and place.startswith(f"{other}.") for other in found)}
    places = sorted({f"under {place}" if place else "at the top level" for place in outermost})
    return f"a field of that name stands {' or '.join(places)}" if 0 < len(places) <= 3 else ""


def _listing(known: Mapping[str, Type]) -> str:
    return f"its fields are {', '.join(known)}"


def wrong_version(version: Any, readable: Sequence[int]) -> str:
    """The file is from a later release, or from none."""
    known = one_of(readable)
    if type(version) is int and version > max(readable):
        return f"version {version} is newer than this release reads, which is {known}; update areno_fn to run it"
    return f"version must be {known}, received {kind_of(version)}"


def _advice(info: Type, value: Any, suffix: str) -> str:
    if suffix == ".msgpack":
        return ""
    if isinstance(info, inspect.LiteralType) and isinstance(value, str) and len(info.values) > _FEW:
        near = suggestion(value, map(str, info.values))
        return near and f"; {near}"
    if isinstance(info, inspect.StrType | inspect.LiteralType) and isinstance(value, bool | int | float):
        return _quote(value, suffix) if _takes_text(info) else ""
    if isinstance(info, inspect.IntType) and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}, without a point or exponent"
    if isinstance(info, inspect.FloatType | inspect.IntType) and isinstance(value, str):
        return _unquote(info, value, suffix)
    if (
        isinstance(info, inspect.BoolType)
        and isinstance(value, str)
        and value.lower() in ("true", "false", "yes", "no", "on", "off")
    ):
        return f"; write {'true' if value.lower() in ('true', 'yes', 'on') else 'false'} without quotes"
    return ""


def _takes_text(info: inspect.StrType | inspect.LiteralType) -> bool:
    return isinstance(info, inspect.StrType) or all(isinstance(value, str) for value in info.values)


def _quote(value: bool | int | float, suffix: str) -> str:
    if isinstance(value, bool) and suffix in (".yaml", ".yml"):
        return "; YAML reads yes, no, on and off as true and false, so put the word in quotes"
    return "; put it in quotes"


def _unquote(info: Type, text: str, suffix: str) -> str:
    try:
        number = int(text) if isinstance(info, inspect.IntType) else float(text)
    except ValueError:
        return ""
    if suffix in (".yaml", ".yml") and yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False)).endswith(
        ":str"
    ):
        return f"; YAML takes a number for text unless it has a point and a signed exponent, so write {number_in_yaml(number)}"
    return f"; write {text.strip()} without quotes"
