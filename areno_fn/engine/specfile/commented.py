"""A specification as commented TOML: what is set stands as it is, what is left at its default is shown behind `#`.

Taking every `#` off the start of a setting changes nothing, because it shows the default. What models of another medium take
is not shown where it stands at its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import tomli_w
from msgspec import Struct

from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.specfile.foreign import FIELDS, kinds_of_others, medium_of
from areno_fn.engine.specfile.meanings import meaning
from areno_fn.engine.specfile.types import Type, default_of, plain_copy, root, structs

_COLUMN = 34


def commented(spec: RunSpec) -> str:
    """TOML text with the meaning of every field, which reads back as `spec`.

    Args:
        spec: a valid specification; its `model.config` must hold no None.
    """
    lines = ["# A specification for `python -m areno_fn.run FILE`. Settings behind # show their defaults.", ""]
    return "\n".join([*lines, *_table(spec, root(), "", _Page(spec))]) + "\n"


class _Page:
    """What the tables of one specification share.

    Attributes:
        told: kinds of tables that have been explained.
        fields: by kind of table, fields of other media.
        others: kinds of tables that its model does not take.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.told: set[type] = set()
        self.fields = FIELDS[medium_of(spec)]
        self.others = kinds_of_others(spec)


def _table(value: Struct, info: Type, path: str, page: _Page) -> Iterator[str]:
    """The settings of one table, then the tables inside it: TOML wants them in this order."""
    struct = next(member for member in structs(info) if member.cls is type(value))
    if struct.tag is not None:
        own = [member.tag for member in structs(info) if not issubclass(member.cls, page.others)]
        yield _line(f"kind = {toml_value(struct.tag)}", _choices(own))
    inner: list[Iterator[str]] = []
    for field in struct.fields:
        item, where = getattr(value, field.name), f"{path}.{field.name}".lstrip(".")
        words = meaning(struct.cls, field.name)
        if field.name in page.fields.get(struct.cls, ()) and plain_copy(item) == default_of(field):
            continue
        if item == {} == default_of(field):
            yield _setting(field, item, words)
        elif _is_table(item):
            inner.append(_inner(item, field.type, where, words, page))
        elif item is None:
            inner.append(iter(["", f"#[{where}]  # {words}"]))
        else:
            yield _setting(field, item, words)
    for lines in inner:
        yield from lines


def _inner(item: Any, info: Type, path: str, words: str, page: _Page) -> Iterator[str]:
    if isinstance(item, dict):
        yield from ("", f"# {words}", *_free_table(item, path))
    elif isinstance(item, list):
        for one in item:
            yield from ("", *_about(one, page), f"[[{path}]]  # {words}", *_table(one, _item_type(info), path, page))
    else:
        yield from ("", *_about(item, page), f"[{path}]  # {words}", *_table(item, info, path, page))


def _free_table(item: dict[str, Any], path: str) -> list[str]:
    nested: Any = item
    for name in reversed(path.split(".")):
        nested = {name: nested}
    return tomli_w.dumps(nested).splitlines()


def _setting(field: msgspec.inspect.Field, item: Any, words: str) -> str:
    default = default_of(field)
    usual = plain_copy(item) == default
    choices = _choices(field.type.values) if isinstance(field.type, msgspec.inspect.LiteralType) else ""
    shown = "" if usual or default is msgspec.NODEFAULT else f"(default {toml_value(default)})"
    mark = "#" if usual and field.name != "version" else ""
    comment = " ".join(part for part in (words + ":" if choices else words, choices, shown) if part)
    return _line(f"{mark}{field.name} = {toml_value(item)}", comment)


def _choices(values: Sequence[Any]) -> str:
    return " | ".join(toml_value(value) for value in values) if len(values) > 1 else ""


def _is_table(item: Any) -> bool:
    return isinstance(item, dict | Struct) or bool(isinstance(item, list) and item and isinstance(item[0], Struct))


def _item_type(info: Type) -> Type:
    assert isinstance(info, msgspec.inspect.ListType)
    return info.item_type


def _about(value: Struct, page: _Page) -> list[str]:
    """What a table is, the first time that one of its kind appears."""
    if type(value) in page.told:
        return []
    page.told.add(type(value))
    return [f"# {line}" for line in (inspect.getdoc(type(value)) or "").splitlines() if line]


def _line(setting: str, words: str) -> str:
    return f"{setting:<{_COLUMN}} # {words}" if words else setting


def toml_value(value: Any) -> str:
    """A value as TOML has it behind a `=`."""
    if value == {}:
        return "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
