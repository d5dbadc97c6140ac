"""How a reward is called: with what its parameters ask for, in the run's folder, for as long as it may take."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import inspect
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

Form = Literal["batch", "group", "one"]
Arguments = tuple[Any, Any]

_FORMS: Mapping[tuple[str, ...], Form] = {("row", "completions"): "group", ("row", "completion"): "one"}

AT_ONCE = 16
"""Calls of an async function that wait at the same time, unless its specification says otherwise."""


class CallError(Exception):
    """A call raised, or took too long.

    Attributes:
        call: which one, where that is known.
        error: what it raised.
    """

    def __init__(self, call: int | None, error: BaseException) -> None:
        super().__init__(call, error)
        self.call = call
        self.error = error


class TookTooLong(Exception):
    """A call gave no answer in the time it had."""


def form_of(function: Callable[..., Any]) -> Form:
    """What a function wants to be called with, by the names of its first two parameters.

    Returns:
        "one" for `(row, completion)`, "group" for `(row, completions)`, and "batch" for anything else.

    Raises:
        TypeError: it cannot be called with two arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have none
        return "batch"
    signature.bind(None, None)
    return _FORMS.get(tuple(signature.parameters)[:2], "batch")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to wait for: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def calls(form: Form, size: int, group: int) -> list[slice]:
    """The completions that each call judges, of `size` that stand in groups of `group`."""
    step = {"batch": max(size, 1), "group": group, "one": 1}[form]
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def arguments(form: Form, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> Arguments:
    """What one call gets: copies, so that a function which writes to them changes nothing but its own."""
    if form == "batch":
        return [copy.deepcopy(dict(row)) for row in rows], list(completions)
    row = copy.deepcopy(dict(rows[0]))
    return (row, completions[0]) if form == "one" else (row, list(completions))


def call_all(
    function: Callable[..., Any], given: Sequence[Arguments], timeout: float = 0.0, at_once: int = AT_ONCE
) -> list[Any]:
    """Calls a function with each pair of arguments, one after the other, or for an async one several at a time.

    A function without a timeout is called in this thread. One with a timeout is called in a thread of its own, which
    is left to itself when it does not come back. Async functions share one event loop for the whole process, so that a
    connection they keep can be used again. Wherever a function changes to, the current folder is the same afterwards.

    Args:
        timeout: seconds for each call; 0 waits as long as it takes.
        at_once: most calls of an async function that wait together.

    Returns:
        What the calls returned, in order.

    Raises:
        CallError: the first failure; with `TookTooLong` where it is about time.
    """
    if is_async(function):
        with same_folder():
            return _together(function, given, timeout, at_once)
    return [_call(function, pair, timeout, number) for number, pair in enumerate(given)]


def _call(function: Callable[..., Any], pair: Arguments, timeout: float, number: int) -> Any:
    try:
        with same_folder():
            return _limited(function, pair, timeout) if timeout else function(*pair)
    except (Exception, SystemExit) as error:  # whatever a user's function raises is reported
        raise CallError(number, error) from error


def _limited(function: Callable[..., Any], pair: Arguments, timeout: float) -> Any:
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((function(*pair), None))
        except BaseException as error:  # it is raised where the answer is awaited
            answers.put((None, error))

    threading.Thread(target=answer, name="reward", daemon=True).start()
    try:
        value, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise TookTooLong from None
    if error is not None:
        raise error
    return value


def _together(function: Callable[..., Any], given: Sequence[Arguments], timeout: float, at_once: int) -> list[Any]:
    waiting = asyncio.run_coroutine_threadsafe(_gather(function, given, timeout, at_once), _event_loop())
    # a call that never gives the loop back cannot be cancelled by it
    longest = timeout * (math.ceil(len(given) / at_once) + 1) if timeout else None
    try:
        return waiting.result(longest)
    except concurrent.futures.TimeoutError:
        _event_loop.cache_clear()
        raise CallError(None, TookTooLong()) from None
    except concurrent.futures.CancelledError as error:  # a function may cancel itself
        raise CallError(None, error) from None
    except BaseException:
        waiting.cancel()
        raise


async def _gather(function: Callable[..., Any], given: Sequence[Arguments], timeout: float, at_once: int) -> list[Any]:
    slots = asyncio.Semaphore(at_once)

    async def one(number: int, pair: Arguments) -> Any:
        async with slots:
            try:
                async with asyncio.timeout(timeout or None) as limit:
                    return await function(*pair)
            except (Exception, SystemExit) as error:  # whatever a user's function raises is reported
                raise CallError(number, TookTooLong() if limit.expired() else error) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, pair)) for number, pair in enumerate(given)]
    except* CallError as failed:
        first = min((error for error in failed.exceptions if isinstance(error, CallError)), key=lambda e: e.call or 0)
        raise first from first.error
    return [task.result() for task in tasks]


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


@contextmanager
def same_folder() -> Iterator[None]:
    """The run writes to paths that may be relative, whatever a function does to the current folder."""
    here = os.open(".", os.O_RDONLY)  # unlike its name, a handle outlives a folder that is moved or removed
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)
