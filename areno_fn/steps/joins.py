"""What a stage takes and returns, read from its annotations when a pipeline is built."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import attrs

from areno_fn.contracts.errors import JoinError

Stage = Callable[..., Any]
"""A function, closure, `functools.partial` or object with `__call__` whose parameters and result are annotated."""


@attrs.frozen(kw_only=True)
class Ends:
    """The two ends of a stage.

    Attributes:
        name: what messages call it.
        takes: the type of every argument it is called with.
        returns: the type of its result.
    """

    name: str
    takes: tuple[Any, ...]
    returns: Any

    def __str__(self) -> str:
        taken = ", ".join(show(kind) for kind in self.takes)
        return f"{self.name}: {taken if len(self.takes) == 1 else f'({taken})'} -> {show(self.returns)}"


def ends(stage: Any, *, arguments: int, before: str = "") -> Ends:
    """Reads the annotations of a stage that is called with so many positional arguments.

    Args:
        stage: the stage.
        arguments: 2 for a first stage (parameters and a batch), 1 for a later one (the previous record).
        before: what messages say of the stage before, for example "score returns Scores".

    Raises:
        JoinError: it cannot be called so, or an annotation is missing or names nothing.
    """
    lead = f"{before}, but " if before else ""
    if not callable(stage):
        raise JoinError(f"{lead}{stage!r} is no stage; a stage is a function or an object with __call__")
    name = stage_name(stage)
    signature = _signature(stage, f"{lead}{name}")
    try:
        bound = signature.bind(*range(arguments))
    except TypeError:
        wanted = "the parameters and a batch" if arguments == 2 else "the one record that the stage before it returns"
        raise JoinError(
            f"{lead}{name} takes {_parameters(signature)}; here it must be callable with {wanted}"
        ) from None
    takes = tuple(
        _annotation(stage, parameter, signature.parameters[parameter].annotation, f"{lead}{name}")
        for parameter in bound.arguments
    )
    returns = _annotation(stage, "return", signature.return_annotation, f"{lead}{name}")
    return Ends(name=name, takes=takes[:arguments], returns=returns)


def join(left: Ends, right: Ends) -> None:
    """Checks that the result of one stage is what the next one takes.

    Raises:
        JoinError: names both stages and both types.
    """
    if not fits(left.returns, right.takes[0]):
        given, taken = show_apart(left.returns, right.takes[0])
        raise JoinError(
            f"{left.name} returns {given}, but {right.name} takes {taken}; "
            f"replace one of the two, or put a stage from {given} to {taken} between them"
        )


def fits(given: Any, taken: Any) -> bool:
    """True when every value of type `given` is one of type `taken`: members of unions and subclasses fit."""
    given, taken = _plain(given), _plain(taken)
    if taken in (Any, object) or given == taken:
        return True
    if _is_union(given):
        return all(fits(member, taken) for member in typing.get_args(given))
    if _is_union(taken):
        return any(fits(given, member) for member in typing.get_args(taken))
    return _class_fits(given, taken)


def show(kind: Any) -> str:
    """A type as it reads in a sentence."""
    if kind is type(None):
        return "None"
    if _is_union(kind):
        return " | ".join(show(member) for member in typing.get_args(kind))
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind.__name__
    return str(kind).replace("typing.", "")


def show_apart(first: Any, second: Any) -> tuple[str, str]:
    """Two types as they read in a sentence, with their modules where the names alone are the same."""
    short = show(first), show(second)
    if short[0] != short[1]:
        return short
    return tuple(
        f"{getattr(kind, '__module__', '?')}.{text}" for kind, text in zip((first, second), short, strict=True)
    )  # type: ignore[return-value]


def stage_name(stage: Any) -> str:
    """What messages call a stage: its own name, or its maker's for a closure that is merely called `stage`."""
    if isinstance(stage, functools.partial):
        return stage_name(stage.func)
    name = getattr(stage, "__qualname__", None) or getattr(stage, "__name__", None) or type(stage).__name__
    scopes = [scope.split(".")[-1] for scope in name.split(".<locals>")]
    return scopes[-2] if scopes[-1] == "stage" and len(scopes) > 1 else scopes[-1]


def _signature(stage: Stage, who: str) -> inspect.Signature:
    try:
        return inspect.signature(stage)
    except ValueError:
        raise JoinError(f"{who} has no signature that could be checked; wrap it in an annotated function") from None


def _annotation(stage: Stage, parameter: str, annotation: Any, who: str) -> Any:
    """The type behind one annotation; text is evaluated where the stage was defined."""
    if annotation is inspect.Signature.empty:
        what = "what it returns" if parameter == "return" else f"what its parameter {parameter!r} takes"
        raise JoinError(f"{who} does not say {what}; annotate it with the record's type")
    function = _function(stage)
    holder = types.SimpleNamespace(__annotations__={parameter: annotation})
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}), _visible(function))[parameter]
    except (NameError, AttributeError) as error:
        place = "its result" if parameter == "return" else f"its parameter {parameter!r}"
        raise JoinError(
            f"{who} annotates {place} with {annotation!r}, where {error.name!r} names nothing; "
            f"import or define it where the stage is defined, at run time too"
        ) from None


def _function(stage: Any) -> Any:
    """The plain function whose module and scope give meaning to the annotations of a stage."""
    while isinstance(stage, functools.partial):
        stage = stage.func
    if not isinstance(stage, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        stage = type(stage).__call__
    return inspect.unwrap(getattr(stage, "__func__", stage))


def _visible(function: Any) -> dict[str, Any]:
    """The local names a function can see: those of the scopes around it that still run, then its closure's."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    scopes = code.co_qualname.split(".<locals>.")
    around = {".<locals>.".join(scopes[:end]) for end in range(1, len(scopes))}
    names: dict[str, Any] = {}
    frame = sys._getframe(1)
    while frame is not None and around:
        if frame.f_globals is function.__globals__ and frame.f_code.co_qualname in around:
            names = {**frame.f_locals, **names}
        frame = frame.f_back  # type: ignore[assignment]
    return names | _closed_over(function)


def _closed_over(function: Any) -> dict[str, Any]:
    names = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell is empty until its variable is assigned
            names[name] = cell.cell_contents
    return names


def _parameters(signature: inspect.Signature) -> str:
    names = list(signature.parameters)
    return f"{len(names)} argument{'' if len(names) == 1 else 's'} ({', '.join(names)})" if names else "no argument"


def _plain(kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Annotated:
        return _plain(typing.get_args(kind)[0])
    return type(None) if kind is None else kind


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _class_fits(given: Any, taken: Any) -> bool:
    """A class fits its bases; a generic fits its bare origin, and another of the same origin if its arguments fit."""
    origin, wanted = typing.get_origin(given) or given, typing.get_origin(taken) or taken
    if not (isinstance(origin, type) and isinstance(wanted, type)) or not _subclass(origin, wanted):
        return False
    arguments, required = typing.get_args(given), typing.get_args(taken)
    if not required:
        return True
    return len(arguments) == len(required) and all(map(fits, arguments, required))


def _subclass(given: type, taken: type) -> bool:
    try:
        return issubclass(given, taken)
    except TypeError:  # a protocol that cannot be asked at run time
        return taken in given.__mro__
