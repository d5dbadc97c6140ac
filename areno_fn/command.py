"""How every command of this package ends: a user's mistake is a sentence and exit code 2, a bug is a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence

from areno_fn.contracts.errors import ArenoError

MISTAKE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(function: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None = None) -> int:
    """Runs a command and turns the ways in which it can end into an exit code.

    Args:
        function: receives the command line's arguments and returns an exit code, or None for 0.
        arguments: instead of those of this process.

    Returns:
        The function's code; 2 after an `ArenoError`, printed as `error: ...`, a line for each of its sentences, and when
        the disk is full or gone; 130 after Ctrl-C; 141 when the reader of the output has gone. Any other exception
        passes through.
    """
    _replace_closed_streams()
    try:
        code = function(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except ArenoError as error:
        report(error)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = f" {error.filename}" if error.filename else ""
        print(
            f"error: the disk refused to write{where} ({error.strerror}); what was saved before is whole",
            file=sys.stderr,
        )
        return MISTAKE
    return code or 0


def report(error: ArenoError) -> None:
    """Prints what a user did wrong on the error stream."""
    sys.stdout.flush()
    for line in "\n".join([str(error), *getattr(error, "__notes__", ())]).splitlines():
        if line.strip():
            print(f"error: {line.strip()}", file=sys.stderr)


def note(text: str) -> None:
    """Says on the error stream what a command did beside what it was asked for."""
    print(f"note: {text}", file=sys.stderr)


def _replace_closed_streams() -> None:
    """Python has None in the place of a stream that was closed when it began (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _discard_output() -> None:
    """Python flushes the output once more on exit; without a reader that would print a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
