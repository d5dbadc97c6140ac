"""What a public function is given: an argument of another type than its annotation says is refused in one sentence."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import attrs
import torch

from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.record import is_record, shown

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
_LONGEST = 60


def checked(function: F) -> F:
    """The function, which refuses arguments of other types than it is annotated with before it begins.

    Protocols and what cannot be asked of a value are left to the function. Nothing is checked while `torch.compile` reads it.

    Raises:
        RecordError: from the function; names the argument, its type, and what was given.
    """
    parameters = inspect.signature(function).parameters
    placed = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if not hints:
                hints.update(typing.get_type_hints(function))
            _require(_called(function), (*zip(placed, args, strict=False), *kwargs.items()), hints, named)
        return function(*args, **kwargs)

    return cast(F, call)


def _called(function: Callable[..., Any]) -> str:
    """How a function is called: what makes an object by its class, and what an object does by both."""
    owner, _, name = function.__qualname__.rpartition(".")
    if not owner or owner.endswith("<locals>"):
        return name
    return owner if name == "__init__" else f"{owner}.{name}" if name != "__call__" else f"a {owner}"


def require_types(value: Any) -> None:
    """Refuses fields of an attrs class that are of other types than they are annotated with.

    Raises:
        SpecError: names the class, the field, its type, and what was given.
    """
    hints = typing.get_type_hints(type(value))
    for field in attrs.fields(type(value)):
        found = getattr(value, field.name)
        if not is_a(found, hints[field.name]):
            raise SpecError(
                f"{type(value).__name__}: {field.name} must be {words_of(hints[field.name])}, received {received(found)}"
            )


def require_given(what: str, value: Any, kind: type, made_by: str) -> None:
    """Refuses what is no `kind`, and says what makes one.

    Raises:
        RecordError: says for what it is needed, and what was given.
    """
    if not isinstance(value, kind):
        raise RecordError(f"{what} {words_of(kind)}, as {made_by} makes it, received {received(value)}")


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that an annotation says; True of what cannot be asked."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_a(value, member) for member in inner)
    if origin is typing.Literal:
        return value in inner
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin is collections.abc.Sequence:
        return (
            isinstance(value, collections.abc.Sequence)
            and not isinstance(value, str)
            and all(is_a(item, inner[0]) for item in value)
        )
    if origin is collections.abc.Collection and isinstance(value, str):
        return False
    kind = type(None) if hint is None else origin or hint
    asked = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return not asked or isinstance(value, kind)


def words_of(hint: Any) -> str:
    """A type as it reads in a sentence."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words_of(member) for member in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(name) for name in inner)
    if origin is collections.abc.Sequence:
        return f"a sequence, of which each is {words_of(inner[0])}"
    if origin is collections.abc.Collection:
        return f"a collection, of which each is {words_of(inner[0])}"
    if origin is collections.abc.Callable:
        return "a function"
    return _WORDS.get(hint) or _one(getattr(origin or hint, "__name__", str(hint)))


def received(value: Any) -> str:
    """What was given, in a few words: tensors, numbers and texts as they are, anything else by its type."""
    kind = type(value).__name__
    if isinstance(value, str | Real | torch.Tensor | list | tuple) or value is None:
        text = shown(value)
        of_kind = f"the {kind} " if isinstance(value, list | tuple) else ""
        return of_kind + text if len(text) <= _LONGEST and "\n" not in text else _one(kind)
    if is_record(value) or not callable(value):
        return _one(kind)
    return f"the {'class' if isinstance(value, type) else kind} {getattr(value, '__name__', '')}".rstrip()


def _require(who: str, given: Iterable[tuple[str, Any]], hints: dict[str, Any], named: set[str]) -> None:
    for name, value in given:
        if name in named and name in hints and not is_a(value, hints[name]):
            raise RecordError(f"{who}: {name} must be {words_of(hints[name])}, received {received(value)}")


def _one(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"
