"""The specification's types as something to walk: which fields a table has, and what a value must be."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from msgspec import NODEFAULT, Struct, inspect

from areno_fn.contracts.spec import RunSpec

Type = inspect.Type
Path = tuple[str | int, ...]

_PATTERNS = {
    "^[A-Za-z0-9_.-]+$": "text of letters, digits, '_', '.' and '-'",
    "^https?://": "an address that begins with http:// or https://",
}
ANY: Type = inspect.AnyType()


@functools.cache
def root() -> inspect.StructType:
    """The type of a whole specification."""
    info = inspect.type_info(RunSpec)
    assert isinstance(info, inspect.StructType)
    return info


def structs(info: Type) -> list[inspect.StructType]:
    """The struct members of a type: one, several for a tagged union, none for anything else."""
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [member for member in members if isinstance(member, inspect.StructType)]


def kinds(info: Type) -> list[str]:
    """The values that the tag of a union of structs may take."""
    return [str(member.tag) for member in structs(info) if member.tag is not None]


def choose(info: Type, raw: Any) -> list[inspect.StructType]:
    """The structs that `raw` can be: the one its tag names, or all of them when it names none."""
    members = structs(info)
    tag = raw.get("kind") if isinstance(raw, dict) else None
    return [member for member in members if member.tag is not None and member.tag == tag] or members


def fields(info: Type, raw: Any = None) -> dict[str, Type]:
    """The fields a table of this type may hold, tag first."""
    found: dict[str, Type] = {}
    for member in choose(info, raw):
        if member.tag is not None:
            found["kind"] = inspect.LiteralType(values=tuple(kinds(info)))
        found.update({field.name: field.type for field in member.fields})
    return found


def strangers(info: Type, raw: Any) -> list[Path]:
    """The places in a table, and in the tables in it, that its type does not have; lists are not looked into."""
    known = fields(info, raw)
    if not known or not isinstance(raw, dict):
        return []
    found: list[Path] = []
    for key, value in raw.items():
        found += [(key, *rest) for rest in strangers(known[key], value)] if key in known else [(key,)]
    return found


def default(info: Type, raw: Any, name: str) -> Any:
    """The plain value that an omitted field stands for, `NODEFAULT` when it is required."""
    for member in choose(info, raw):
        for field in member.fields:
            if field.name == name:
                return default_of(field)
    return NODEFAULT


def default_of(field: inspect.Field) -> Any:
    """The default of one field as plain dicts, lists and scalars."""
    value = field.default if field.default_factory is NODEFAULT else field.default_factory()
    return value if value is NODEFAULT else plain_copy(value)


def plain_copy(value: Any) -> Any:
    """Structs as dicts with their tag, tuples as lists, all of it fresh; anything else stays itself."""
    if isinstance(value, Struct):
        tag = value.__struct_config__.tag
        head = {} if tag is None else {"kind": tag}
        return head | {name: plain_copy(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    return [plain_copy(item) for item in value] if isinstance(value, list | tuple) else value


def child(info: Type, raw: Any, key: str | int) -> Type:
    """The type of a field or an item."""
    if isinstance(key, int):
        if isinstance(info, inspect.TupleType):
            return info.item_types[key] if key < len(info.item_types) else ANY
        return info.item_type if isinstance(info, inspect.ListType) else ANY
    if isinstance(info, inspect.DictType):
        return info.value_type
    return fields(info, raw).get(key, ANY)


def misfit(info: Type, value: Any) -> list[str]:
    """The first key of a table of texts under which no such text stands; nothing of any other type."""
    if not isinstance(info, inspect.DictType) or not isinstance(info.value_type, inspect.StrType):
        return []
    least = info.value_type.min_length or 0
    wrong = [key for key, item in value.items() if not isinstance(item, str) or len(item) < least]
    return wrong[:1]


def labels(info: Type, items: list[Any]) -> list[str]:
    """How the items of a list are called: their `name` or `role` where that is unique, else their index."""
    item_type = child(info, items, 0)
    names = [_label(item_type, item) for item in items]
    return [name if name and names.count(name) == 1 else str(index) for index, name in enumerate(names)]


def _label(info: Type, item: Any) -> str:
    for key in ("name", "role"):
        if isinstance(item, dict) and key in fields(info, item):
            value = item.get(key, default(info, item, key))
            return value if isinstance(value, str) else ""
    return ""


def locate(raw: Any, path: Path) -> tuple[str, Any, Type]:
    """The readable name, the value and the type of a place in a specification; the value of an absent place is None."""
    node, names = raw, []
    info: Type = root()
    for key in path:
        names.append(labels(info, node)[key] if isinstance(node, list) and isinstance(key, int) else str(key))
        info = child(info, node, key)
        node = _item(node, key)
    return ".".join(names), node, info


def _item(node: Any, key: str | int) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    return node[key] if isinstance(node, list | tuple) and isinstance(key, int) and key < len(node) else None


def homes(name: str) -> list[str]:
    """The tables in which a field of this name exists, "" for the top level."""
    return [
        ".".join(path) for path, struct in _tables(root(), ()) if any(field.name == name for field in struct.fields)
    ]


def _tables(struct: inspect.StructType, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], inspect.StructType]]:
    yield path, struct
    for field in struct.fields:
        item = field.type.item_type if isinstance(field.type, inspect.ListType) else field.type
        for member in structs(item):
            yield from _tables(member, (*path, field.name))


def describe(info: Type) -> str:
    """What a value of this type must be, in words."""
    match info:
        case inspect.IntType():
            return "an integer" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            if info.min_length:
                return "text that is not empty"
            return "text" if info.pattern is None else _PATTERNS.get(info.pattern, f"text matching {info.pattern!r}")
        case inspect.LiteralType():
            return one_of(info.values)
        case inspect.ListType():
            return "a list" + (f" of at least {info.min_length}" if info.min_length else "")
        case inspect.TupleType():
            return f"a list of {len(info.item_types)}, each {describe(info.item_types[0])}"
        case inspect.UnionType() | inspect.StructType():
            return f"a table with kind {one_of(kinds(info))}" if kinds(info) else "a table"
        case inspect.DictType():
            return "a table"
        case _:
            return "a plain value"


def one_of(values: Any) -> str:
    """`'a', 'b' or 'c'`."""
    *most, last = [repr(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    if info.ge is not None and info.le is not None:
        return f" from {info.ge} to {info.le}"
    lower = f"above {info.gt}" if info.gt is not None else f"of at least {info.ge}" if info.ge is not None else ""
    upper = f"below {info.lt}" if info.lt is not None else f"at most {info.le}" if info.le is not None else ""
    found = [part for part in (lower, upper) if part]
    return " " + " and ".join(found) if found else ""
