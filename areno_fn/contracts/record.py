"""`@record`: immutable, typed, keyword-only classes that are pytrees.

A record is an attrs class whose fields are the children of a node in torch's own pytree, so that
`torch.func`, `torch.compile` and `areno_fn.tree` all see through it. Three rules:

* a field made with `static()` is auxiliary data (part of the tree's structure, compared with `==`);
* a field that is `None` is structure too, not a leaf: an absent bias has no gradient;
* `__check__` runs when a record is constructed and is skipped when a transform rebuilds one, because
  transforms put placeholders into leaves.

Records are final, and they are not pickled: what is stored goes through `areno_fn.ckpt`.

The constructor spells `object.__setattr__(self, "name", value)` literally: attrs' own frozen
constructor breaks `torch.compile(fullgraph=True)`, this one does not.
"""

from __future__ import annotations

import copy
import sys
import typing
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar, dataclass_transform

import attrs
import torch
import torch.utils._pytree as pytree
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from areno_fn.contracts.errors import DonatedError, ImmutableError, RecordError

T = TypeVar("T")

_STATIC = "areno_fn.static"
_DYNAMIC = "__areno_dynamic__"
_MISSING: Any = object()
_donated: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def static(*, default: Any = attrs.NOTHING) -> Any:
    """Declares a field that belongs to the structure of a record rather than to its leaves.

    Args:
        default: value when the argument is omitted. Static values must be hashable.
    """
    return attrs.field(default=default, metadata={_STATIC: True})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(attrs.field, static))
def record(cls: type[T]) -> type[T]:
    """Makes a class an immutable keyword-only record and a node of torch's pytree.

    An optional method `__check__(self)` validates values at construction; it raises `RecordError`.
    """
    user_check = cls.__dict__.get("__check__")
    cls = attrs.frozen(cls, slots=True, eq=False, init=False, repr=False, kw_only=True)
    fields = attrs.fields(cls)  # type: ignore[arg-type]
    names = tuple(f.name for f in fields)
    dynamic = tuple(f.name for f in fields if _STATIC not in f.metadata)
    fixed = tuple(f.name for f in fields if _STATIC in f.metadata)
    setattr(cls, "__init__", _constructor(cls, fields, user_check))
    setattr(cls, "__repr__", shown)
    setattr(cls, "__setattr__", _refuse_change)
    setattr(cls, "__delattr__", _refuse_change)
    setattr(cls, "__getattr__", _missing_attribute(names))
    setattr(cls, "__copy__", lambda self: _rebuilt(self, lambda item: item))
    setattr(cls, "__deepcopy__", lambda self, memo: _rebuilt(self, lambda item: copy.deepcopy(item, memo)))
    setattr(cls, "__reduce_ex__", _refuse_pickle)
    setattr(cls, "__init_subclass__", classmethod(_refuse_subclass))
    _register(cls, dynamic, fixed)
    return cls


def is_record(value: object) -> bool:
    """True for an instance of a class made with `@record`."""
    return getattr(type(value), "__areno_record__", False)


def replace(value: T, /, **changes: Any) -> T:
    """A copy of a record with some fields changed; the checks run on the result."""
    names = field_names(value)
    for name in changes:
        if name not in names:
            raise RecordError(f"{type(value).__name__} has no field {name!r}; it has {', '.join(names)}")
    return type(value)(**{n: changes[n] if n in changes else getattr(value, n) for n in names})


def field_names(value: object) -> tuple[str, ...]:
    """The names of a record's fields in declaration order, static ones included."""
    if not is_record(value):
        raise RecordError(f"{type(value).__name__} is not a record; make its class one with @record")
    return tuple(f.name for f in attrs.fields(type(value)))  # type: ignore[arg-type]


def static_names(value: object) -> tuple[str, ...]:
    """The names of a record's static fields in declaration order."""
    field_names(value)
    return tuple(f.name for f in attrs.fields(type(value)) if _STATIC in f.metadata)  # type: ignore[arg-type]


def children_of(value: object) -> list[Any]:
    """The dynamic fields of a record that are not None, in declaration order."""
    return [item for name in getattr(type(value), _DYNAMIC) if (item := getattr(value, name)) is not None]


def donate(value: T) -> T:
    """Hands a record over: returns a new record with the same leaves and makes the old one unreadable.

    The caller promises not to look at `value` again, so the receiver may reuse its storage. Reading a
    field of the old record raises `DonatedError` that says where it was handed over.
    """
    caller = sys._getframe(1)
    outside = _outside(caller)
    fresh = _rebuilt(value, lambda item: item)
    for name in field_names(value):
        object.__delattr__(value, name)
    _donated[value] = _place(outside) if outside is caller else f"{_place(outside)}, by {_place(caller)}"
    return fresh


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _outside(frame: FrameType) -> FrameType:
    """The nearest frame that is none of this package: the line that a reader can change; where all are, the frame itself."""
    package, found = __name__.partition(".")[0], frame
    while str(found.f_globals.get("__name__", "")).partition(".")[0] == package:
        if found.f_back is None:
            return frame
        found = found.f_back
    return found


def _rebuilt(value: T, change: Callable[[Any], Any]) -> T:
    """A record of the same class with every field mapped by `change`; no checks."""
    items = [(name, change(getattr(value, name))) for name in field_names(value)]
    fresh = object.__new__(type(value))
    for name, item in items:
        object.__setattr__(fresh, name, item)
    return fresh


def _refuse_change(self: Any, name: str, value: Any = None) -> None:
    del value
    raise ImmutableError(f"{type(self).__name__} is immutable; make another one, replace(value, {name}=...)")


def _refuse_pickle(self: Any, protocol: Any) -> Any:
    del protocol
    raise TypeError(f"{type(self).__name__} cannot be pickled; save its leaves with areno_fn.ckpt")


def _refuse_subclass(cls: type) -> None:
    raise TypeError(
        f"{cls.__name__} extends a record; records are final, so give {cls.__name__} a field that holds one"
    )


def _constructor(cls: type, fields: Any, user_check: Callable[[Any], None] | None) -> Callable[..., None]:
    """Writes `__init__` as source, so that Dynamo sees plain `object.__setattr__` calls."""
    scope: dict[str, Any] = {"_MISSING": _MISSING, "_types": _type_checker(cls), "_check": user_check}
    scope["_compiling"] = torch.compiler.is_compiling
    parameters, body = [], []
    for f in fields:
        if f.default is attrs.NOTHING:
            parameters.append(f.name)
        elif isinstance(f.default, attrs.Factory):  # type: ignore[arg-type]
            scope[f"_make_{f.name}"] = f.default.factory
            parameters.append(f"{f.name}=_MISSING")
            body.append(f"if {f.name} is _MISSING: {f.name} = _make_{f.name}()")
        else:
            scope[f"_default_{f.name}"] = f.default
            parameters.append(f"{f.name}=_default_{f.name}")
        body.append(f"object.__setattr__(self, {f.name!r}, {f.name})")
    body.append("if not _compiling(): _types(self)")
    if user_check is not None:
        body.append("_check(self)")
    star = "*, " if parameters else ""
    source = f"def __init__(self, {star}{', '.join(parameters)}):\n    " + "\n    ".join(body)
    exec(source, scope)  # the text is built from field names only
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {**{f.name: f.type for f in fields}, "return": None}
    return init


def _type_checker(cls: type) -> Callable[[Any], None]:
    """Checks each field against its annotation with typeguard, all items of a container included."""
    hints: dict[str, Any] = {}

    def check(self: Any) -> None:
        if not hints:
            hints.update(_resolve_hints(type(self)))
        for name, hint in hints.items():
            value = getattr(self, name)
            if hint is torch.Tensor and isinstance(value, torch.Tensor):
                continue
            try:
                check_type(value, hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
            except TypeCheckError as error:
                raise RecordError(f"{type(self).__name__}.{name}: {error}") from None

    del cls
    return check


def _resolve_hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]))
    return {f.name: hints[f.name] for f in attrs.fields(cls)}


def _missing_attribute(names: tuple[str, ...]) -> Callable[[Any, str], Any]:
    """`__getattr__` runs only when a slot is empty, so reading a live record costs nothing extra."""

    def missing(self: Any, name: str) -> Any:
        where = _donated.get(self) if name in names else None
        if where is not None:
            raise DonatedError(
                f"{type(self).__name__}.{name} was read after this record was donated at {where}\n"
                "    instead of   new = step(old)   which leaves `old` unreadable,\n"
                "    write        old = step(old)   and go on with what the call returned"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return missing


def _register(cls: type, dynamic: tuple[str, ...], fixed: tuple[str, ...]) -> None:
    def flatten(self: Any) -> tuple[list[Any], Any]:
        present = tuple(n for n in dynamic if getattr(self, n) is not None)
        return [getattr(self, n) for n in present], (present, tuple(getattr(self, n) for n in fixed))

    def flatten_with_keys(self: Any) -> tuple[list[Any], Any]:
        children, context = flatten(self)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(context[0], children, strict=True)], context

    def unflatten(children: Any, context: Any) -> Any:
        present, values = context
        self: Any = object.__new__(cls)
        for name in dynamic:
            object.__setattr__(self, name, None)
        for name, child in zip(present, children, strict=True):
            object.__setattr__(self, name, child)
        for name, value in zip(fixed, values, strict=True):
            object.__setattr__(self, name, value)
        return self

    setattr(cls, "__areno_record__", True)
    setattr(cls, _DYNAMIC, dynamic)
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool",
}  # fmt: skip


def shown(value: Any) -> str:
    """Text of a value for messages: tensors by type and shape, as in `f32[2,3]`, records by their fields."""
    return _format(value, 0)


def _format(value: Any, depth: int) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype))}[{','.join(map(str, value.shape))}]"
    if is_record(value):
        if value in _donated:
            return f"{type(value).__name__}(<donated at {_donated[value]}>)"
        items = [f"{n}={_format(getattr(value, n), depth + 1)}" for n in field_names(value)]
        return _wrap(f"{type(value).__name__}(", items, ")", depth)
    if isinstance(value, Mapping):
        return _wrap("{", [f"{k!r}: {_format(v, depth + 1)}" for k, v in value.items()], "}", depth)
    if isinstance(value, tuple | list):
        shown = [_format(v, depth + 1) for v in value]
        if len(shown) > 2 and len(set(shown)) == 1:  # a stack of equal layers reads better as one
            shown = [f"{len(shown)} x {shown[0]}"]
        return _wrap("[" if isinstance(value, list) else "(", shown, "]" if isinstance(value, list) else ")", depth)
    return repr(value)


def _wrap(left: str, items: list[str], right: str, depth: int) -> str:
    line = left + ", ".join(items) + right
    if len(line) + 2 * depth <= 96 and "\n" not in line:
        return line
    pad = "  " * (depth + 1)
    return left + "".join(f"\n{pad}{item}," for item in items) + "\n" + "  " * depth + right
