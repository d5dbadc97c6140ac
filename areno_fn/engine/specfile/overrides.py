"""`--set a.b=value`: changes to plain data before it is checked, typed by the field they name."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import attrs
from msgspec import NODEFAULT, inspect

from areno_fn.contracts.errors import SpecError
from areno_fn.engine.specfile.formats import kind_of, require_plain
from areno_fn.engine.specfile.sentences import suggestion, unknown_field
from areno_fn.engine.specfile.types import Path, Type, child, default, fields, kinds, labels, root, strangers


@attrs.frozen
class Change:
    """What an override did.

    Attributes:
        path: the place that was set.
        dropped: the settings that went with it, as the kind that was set has none of the name, as places below `path`'s table.
    """

    path: Path
    dropped: tuple[Path, ...]


def apply(raw: dict[str, Any], override: str) -> Change:
    """Changes `raw` in place; tables and lists that the file left out start from their defaults.

    Args:
        raw: plain data of a specification.
        override: `address=value`. The address is dotted; an item of a list goes by its `name`, its `role` or its index.
            Text fields take the words as they are; everything else is read as JSON, then as a TOML value.

    Raises:
        SpecError: the address names nothing, or the text has no `=`.
    """
    address, equals, text = override.partition("=")
    if not equals or "" in address.strip().split("."):
        raise SpecError(
            f"--set {override}: an override is written address=value, for example --set phases.sft.steps=100"
        )
    try:
        change = _set(raw, root(), address.strip(), text, (), "")
    except _Unknown as error:
        raise SpecError(f"--set {override}: {unknown_field(raw, error.path, error.name)}") from None
    except _Nowhere as error:
        raise SpecError(f"--set {override}: {error}") from None
    require_plain(raw, f"--set {override}")
    return change


class _Nowhere(Exception):
    """The address names nothing."""


class _Unknown(Exception):
    """The table at `path` has no field `name`."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        self.path, self.name = path, name


def _set(node: Any, info: Type, address: str, text: str, path: Path, where: str) -> Change:
    key, shown, rest = _next(node, info, address, path, where)
    inner = child(info, node, key)
    if not rest:
        before = node.get(key) if isinstance(node, dict) else None
        node[key] = _value(text, inner)
        dropped = _drop_strangers(node, info, before) if key == "kind" and isinstance(node, dict) else ()
        return Change((*path, key), dropped)
    if isinstance(node, dict):
        _fill(node, info, inner, shown)
    return _set(node[key], inner, rest, text, (*path, key), f"{where}.{shown}".lstrip("."))


def _next(node: Any, info: Type, address: str, path: Path, where: str) -> tuple[str | int, str, str]:
    """The first part of an address as a key, as a person says it, and the rest of the address."""
    if isinstance(node, list):
        return _item(node, info, address, where)
    if isinstance(node, dict):
        return _field(node, info, address, path)
    raise _Nowhere(f"{where} is {kind_of(node)} and has nothing inside")


def _fill(node: dict[str, Any], info: Type, inner: Type, key: str) -> None:
    """Writes out the default of an omitted table or list, so that one part of it can be changed."""
    if node.get(key) is None:
        start = default(info, node, key)
        lists = isinstance(inner, inspect.ListType)
        node[key] = start if start is not NODEFAULT and start is not None else [] if lists else {}


def _drop_strangers(node: dict[str, Any], info: Type, before: Any) -> tuple[Path, ...]:
    """A table that has become of another kind keeps the settings that this kind has too, and what no kind of it had."""
    if node["kind"] not in kinds(info):
        return ()
    wrong = strangers(info, node | {"kind": before})
    dropped = tuple(place for place in strangers(info, node) if place not in wrong)
    for place in dropped:
        table: Any = node
        for key in place[:-1]:
            table = table[key]
        del table[place[-1]]
    return dropped


def _field(node: dict[str, Any], info: Type, address: str, path: Path) -> tuple[str, str, str]:
    head, _, rest = address.partition(".")
    known = fields(info, node)
    if not known:  # a free table: its own keys may contain dots
        head = max((key for key in node if _leads(key, address)), key=len, default=head)
        rest = address[len(head) + 1 :]
    elif head not in known:
        raise _Unknown(path, head)
    return head, head, rest


def _item(node: list[Any], info: Type, address: str, where: str) -> tuple[int, str, str]:
    names = labels(info, node)
    known = {str(index): index for index in range(len(node))} | {name: index for index, name in enumerate(names)}
    matching = [name for name in known if _leads(name, address)]
    if not matching:
        head = address.partition(".")[0]
        has = f"its items are {', '.join(names)}" if names else f"it is empty; give it whole, {where}=[{{ ... }}]"
        raise _Nowhere(f"{where} has no item {head!r}; {suggestion(head, names) or has}")
    name = max(matching, key=len)
    return known[name], names[known[name]], address[len(name) + 1 :]


def _leads(name: str, address: str) -> bool:
    return address == name or address.startswith(name + ".")


def _value(text: str, info: Type) -> Any:
    if _only_text(info):
        return _quoted(text)
    return _scalar(text)


def _only_text(info: Type) -> bool:
    words = isinstance(info, inspect.LiteralType) and all(isinstance(value, str) for value in info.values)
    return words or isinstance(info, inspect.StrType)


def _quoted(text: str) -> str:
    value = _scalar(text) if text.startswith('"') else text
    return value if isinstance(value, str) else text


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return value["value"] if len(value) == 1 else text
