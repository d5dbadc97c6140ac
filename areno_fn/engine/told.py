"""What a specification says, as plain data to be compared or hashed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct


def told(value: Any, *, full: bool, aside: Collection[str] = ()) -> Any:
    """Structs as dicts of their fields with their kind, inside dicts and lists too; anything else as it is.

    Args:
        full: with every field. Else without those at their default: then what is told stays the same when a struct gets a
            field by a later release, whose default is what the release before did.
        aside: names of fields of `value` itself that are left out.
    """
    if isinstance(value, Struct):
        tag = value.__struct_config__.tag
        kept = {} if tag is None else {"kind": tag}
        for field in msgspec.structs.fields(value):
            own = getattr(value, field.name)
            if field.name not in aside and (full or own != _default(field)):
                kept[field.name] = told(own, full=full)
        return kept
    if isinstance(value, dict):
        return {key: told(item, full=full) for key, item in value.items()}
    return [told(item, full=full) for item in value] if isinstance(value, list | tuple) else value


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()
