"""How a reward is called: in the run's folder, for as long as it may take, and several times at once where it is async."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import BoundArguments
from typing import Any

from areno_fn.world.rewards_form import is_async

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


def described(error: BaseException) -> str:
    """What a user's code raised, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def call_all(
    function: Callable[..., Any], given: Sequence[BoundArguments], timeout: float = 0.0, at_once: int = AT_ONCE
) -> list[Any]:
    """Calls a function with each of the arguments, one after the other, or for an async one several at a time.

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
    return [_call(function, bound, timeout, number) for number, bound in enumerate(given)]


def _call(function: Callable[..., Any], bound: BoundArguments, timeout: float, number: int) -> Any:
    try:
        with same_folder():
            return _limited(function, bound, timeout) if timeout else function(*bound.args, **bound.kwargs)
    except (Exception, SystemExit) as error:  # whatever a user's function raises is reported
        raise CallError(number, error) from error


def _limited(function: Callable[..., Any], bound: BoundArguments, timeout: float) -> Any:
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((function(*bound.args, **bound.kwargs), None))
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


def _together(function: Callable[..., Any], given: Sequence[BoundArguments], timeout: float, at_once: int) -> list[Any]:
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


async def _gather(
    function: Callable[..., Any], given: Sequence[BoundArguments], timeout: float, at_once: int
) -> list[Any]:
    slots = asyncio.Semaphore(at_once)

    async def one(number: int, bound: BoundArguments) -> Any:
        async with slots:
            try:
                async with asyncio.timeout(timeout or None) as limit:
                    return await function(*bound.args, **bound.kwargs)
            except (Exception, SystemExit) as error:  # whatever a user's function raises is reported
                raise CallError(number, TookTooLong() if limit.expired() else error) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, bound)) for number, bound in enumerate(given)]
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
