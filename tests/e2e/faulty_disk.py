"""A disk that stops, or refuses, at one chosen operation, with every write cut at the boundaries of 64 KiB."""

from __future__ import annotations

import inspect
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from areno_fn.ckpt import disk

BOUNDARY = 1 << 16
Fault = Literal["stop", "kill"] | OSError


class Stopped(BaseException):
    """The process is gone: nothing catches it, and no operation is done after it."""


class FaultyDisk:
    """Every operation of `areno_fn.ckpt.disk`, counted.

    Args:
        at: the number of the operation that fails, from 0; None: none does.
        fault: "stop" raises `Stopped` there and at every later operation, as if the process had ended; "kill" ends
            the process; an error is raised once.
    """

    def __init__(self, at: int | None = None, fault: Fault = "stop") -> None:
        self.at = at
        self.fault = fault
        self.done: list[str] = []
        self.failed = False

    @contextmanager
    def installed(self) -> Iterator[FaultyDisk]:
        """In its block all writing goes through this disk."""
        real = {name: function for name, function in vars(disk).items() if _is_operation(function)}
        for name, function in real.items():
            setattr(disk, name, self._watched(name, function))
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(disk, name, function)

    def count(self) -> Counter[str]:
        """How often each operation was done."""
        return Counter(self.done)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            if self.failed and self.fault == "stop":
                raise Stopped
            if self.at == len(self.done) and not self.failed:
                self.failed = True
                self._fail()
            self.done.append(name)
            # nothing here stops the machine, so waiting for the disk adds nothing
            return None if name.startswith("sync") else real(*_cut(args))

        return operation

    def _fail(self) -> None:
        if isinstance(self.fault, OSError):
            raise self.fault
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Stopped


def _is_operation(value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == disk.__name__ and not value.__name__.startswith("_")


def _cut(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a write, with no more data than there is room up to the next boundary of its file."""
    if not any(isinstance(value, memoryview) for value in args):
        return args
    room = BOUNDARY - os.lseek(args[0], 0, os.SEEK_CUR) % BOUNDARY
    return tuple(value[:room] if isinstance(value, memoryview) else value for value in args)
