"""Every operation that changes the disk, each one system call or nearly so.

All writing of `areno_fn.ckpt` goes through this module, so that a test can let any single operation fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_RANGE_WRITE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_RANGE = getattr(_LIBC, "sync_file_range", None)
if _SYNC_RANGE is not None:
    _SYNC_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def make_folder(path: Path) -> None:
    """Makes a folder that does not exist yet."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Makes a file that does not exist yet; returns its descriptor, open for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write(descriptor: int, data: memoryview) -> int:
    """Appends bytes; returns how many were taken."""
    return os.write(descriptor, data)


def begin_flush(descriptor: int, start: int, count: int) -> None:
    """Asks the system to begin bringing a stretch of a file to the disk, so that `sync` has less to wait for.

    Advice: nothing depends on it, and whatever the disk refuses is told by `sync`.
    """
    if _SYNC_RANGE is not None:
        _SYNC_RANGE(descriptor, start, count, _SYNC_RANGE_WRITE)


def sync(descriptor: int) -> None:
    """Returns when everything written to the descriptor is on the disk."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Gives a file or folder another name in one step; a file that has the name is replaced."""
    os.rename(source, target)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step. False, and nothing done, where the system cannot."""
    if not hasattr(_LIBC, "renameat2"):
        return False
    if _LIBC.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def remove_file(path: Path) -> None:
    """Removes a file or a link, if it is there."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Removes an empty folder."""
    os.rmdir(path)
