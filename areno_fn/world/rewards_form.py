"""What a reward is called with: its parameters say it by their names, in any order."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import BoundArguments, Parameter, Signature
from typing import Any, Literal

from areno_fn.contracts.spec import Medium

Form = Literal["batch", "group", "one"]

FORMS: Mapping[tuple[Medium, Form], tuple[str, str]] = {
    ("text", "batch"): ("rows", "completions"),
    ("text", "group"): ("row", "completions"),
    ("text", "one"): ("row", "completion"),
    ("pictures", "batch"): ("rows", "pictures"),
    ("pictures", "group"): ("row", "pictures"),
    ("pictures", "one"): ("row", "picture"),
}
"""The two parameters of every form, by what is judged."""

SHOWN: Mapping[Medium, str] = {"text": "completions", "pictures": "pictures"}
"""What is judged."""

LEGAL: Mapping[Medium, str] = {
    "text": "(rows, completions), (row, completions) or (row, completion)",
    "pictures": "(rows, pictures), (row, pictures) or (row, picture)",
}


def form_of(function: Callable[..., Any]) -> Form:
    """What a function wants to be called with, by the names of its parameters.

    Returns:
        The form of `FORMS` whose names it has; every parameter beside them has a default, or takes what is left over.

    Raises:
        TypeError: there is no such form, or more than one.
    """
    return _said(function)[1]


def medium_of(function: Callable[..., Any]) -> Medium:
    """What a function judges, by the names of its parameters.

    Raises:
        TypeError: as `form_of`.
    """
    return _said(function)[0]


def _said(function: Callable[..., Any]) -> tuple[Medium, Form]:
    named = [p for p in _signature(function).parameters.values() if p.kind not in _LEFT_OVER]
    known, needed = {p.name for p in named}, {p.name for p in named if p.default is Parameter.empty}
    found = [said for said, pair in FORMS.items() if needed <= set(pair) <= known]
    if len(found) != 1:
        raise TypeError(f"its parameters are {_bare(function)}")
    return found[0]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to wait for: an `async def`, or an object whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def calls(form: Form, size: int, group: int) -> list[slice]:
    """The completions that each call judges, of `size` that stand in groups of `group`."""
    step = {"batch": max(size, 1), "group": group, "one": 1}[form]
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def arguments(
    function: Callable[..., Any], rows: Sequence[Mapping[str, Any]], completions: Sequence[Any]
) -> BoundArguments:
    """What one call gets, by name: copies, so that a function which writes to them changes nothing but its own.

    Raises:
        TypeError: as `form_of`.
    """
    medium, form = _said(function)
    first, second = FORMS[medium, form]
    given = {
        first: [copy.deepcopy(dict(row)) for row in rows] if form == "batch" else copy.deepcopy(dict(rows[0])),
        second: completions[0] if form == "one" else list(completions),
    }
    signature = _signature(function)
    # in the order of the signature, in which those that have no name for a caller are passed
    return BoundArguments(signature, {name: given[name] for name in signature.parameters if name in given})


_LEFT_OVER = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _signature(function: Callable[..., Any]) -> Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a function written in C may have none
        raise TypeError("it does not say what its parameters are called") from None


def _bare(function: Callable[..., Any]) -> Signature:
    """The signature without annotations, which can be long."""
    return Signature([p.replace(annotation=Parameter.empty) for p in _signature(function).parameters.values()])
