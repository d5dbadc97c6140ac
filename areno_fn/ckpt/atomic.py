"""Folders and files that appear whole or not at all.

What is written stands beside its final name, in the same file system, until all of it is on the disk; then one
rename puts it in place. A crash at any moment leaves what was there before. What a crashed writer left behind
is removed by the next one that writes the same name; a lock tells the living from the dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areno_fn.ckpt import disk
from areno_fn.ckpt.paths import destination
from areno_fn.contracts.errors import CheckpointError

_UNLOCKED = (errno.EWOULDBLOCK, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """Writes a folder, replacing one of that name.

    Use as `with folder(path) as scratch:` and write into `scratch`; the folder gets its name when the block
    ends, and is gone when the block ends with an exception. Files in it must be on the disk by then
    (`write_file`), and so must the names in folders inside it.

    Raises:
        CheckpointError: the disk refuses, or `path` is a file; what was there before is untouched.
    """
    final = Path(os.path.realpath(destination(path)))
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{path} is a file, where a folder is to be written; move it or choose another name")
    with _reported(path), _scratch(final) as scratch:
        yield scratch


@contextmanager
def file(path: Path) -> Iterator[Path]:
    """Writes a file, replacing one of that name: `with file(path) as scratch:`, where `scratch` is the file to make.

    Raises:
        CheckpointError: the disk refuses, or `path` is a folder; what was there before is untouched.
    """
    final = Path(os.path.realpath(destination(path)))
    if final.is_dir():
        raise CheckpointError(f"{path} is a folder, where a file is to be written; choose another name")
    with _reported(path), _scratch(final, of_folder=False) as scratch:
        yield scratch / final.name


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file and returns when it is on the disk."""
    descriptor = disk.create(path)
    try:
        write_all(descriptor, memoryview(data))
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all of `data`, however often the system takes only a part."""
    while data:
        data = data[disk.write(descriptor, data) :]


def restore(path: Path) -> None:
    """Puts a folder back that a crash left aside while it was being replaced; does nothing otherwise."""
    final = Path(os.path.realpath(path))
    if not final.name:  # the root of all folders, which nothing replaces
        return
    aside = _aside(final)
    if aside.is_dir() and not final.exists():
        disk.rename(aside, final)
        disk.sync_folder(final.parent)


def sweep(parent: Path, name: str) -> None:
    """Removes what crashed writers of `name` (a pattern as for `glob`) left in `parent`.

    Raises:
        CheckpointError: the disk refuses.
    """
    for leftover in sorted(parent.glob(f".{name}.writing-*")):
        if leftover.is_symlink() or not leftover.is_dir():  # no writer made it, and opening it may wait for ever
            continue
        # another writer may sweep too
        with _removing(leftover), suppress(FileNotFoundError):
            _remove_if_abandoned(leftover)


def retire(path: Path) -> None:
    """Removes a folder so that it never stands half removed under its own name.

    Raises:
        CheckpointError: the disk refuses.
    """
    # another writer may remove it too
    with _removing(path), suppress(FileNotFoundError):
        unnamed = _writing(path)
        disk.rename(path, unnamed)
        _remove(unnamed)


@contextmanager
def _scratch(final: Path, *, of_folder: bool = True) -> Iterator[Path]:
    final.parent.mkdir(parents=True, exist_ok=True)
    restore(final)
    sweep(final.parent, _literal(final.name))
    _remove(_aside(final))
    scratch = _writing(final)
    disk.make_folder(scratch)
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor)
        whole = False
        try:
            yield scratch
            disk.sync_folder(scratch)
            whole = True
        finally:
            if not whole:
                _remove(scratch)
        _place_folder(scratch, final) if of_folder else _place_file(scratch, final)
    finally:
        os.close(descriptor)


def _place_folder(scratch: Path, final: Path) -> None:
    old = scratch
    if not final.exists():
        disk.rename(scratch, final)
    elif not disk.exchange(scratch, final):
        # two renames: a crash between them is undone by `restore`
        old = _aside(final)
        disk.rename(final, old)
        disk.rename(scratch, final)
    disk.sync_folder(final.parent)
    with suppress(OSError):  # the new folder is in place; what stays of the old one goes with the next write
        _remove(old)


def _place_file(scratch: Path, final: Path) -> None:
    disk.rename(scratch / final.name, final)
    disk.sync_folder(final.parent)
    with suppress(OSError):  # as above
        _remove(scratch)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({_reason(error)}); what was there before is untouched"
        ) from error


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed ({_reason(error)})") from error


def _reason(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"


def _remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it, if it is there; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            _remove(child)
        disk.remove_folder(path)
    else:
        disk.remove_file(path)


def _remove_if_abandoned(leftover: Path) -> None:
    descriptor = os.open(leftover, os.O_RDONLY)
    try:
        abandoned = _lock(descriptor)
    finally:
        os.close(descriptor)
    if abandoned:
        _remove(leftover)


def _lock(descriptor: int) -> bool:
    """Locks until the descriptor is closed. False where another holds the lock or the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNLOCKED:
            return False
        raise
    return True


def _writing(final: Path) -> Path:
    return final.with_name(f".{final.name}.writing-{os.getpid()}")


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
