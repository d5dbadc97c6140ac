"""Which files may be read as part of a folder, those that are in it, and how they are opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from areno_fn.ckpt.words import brief
from areno_fn.contracts.errors import CheckpointError


def member(folder: Path, name: str) -> Path:
    """The path of a file that a folder, or an index in it, names.

    A link may point to another place in the folder. The cache of the Hugging Face hub keeps the contents of
    `snapshots/<revision>` in `blobs` beside `snapshots`; links of a snapshot into it are followed too.

    Raises:
        CheckpointError: the name is absolute, climbs with `..`, is not written in its shortest form, holds a
            character that cannot be printed, or leaves the folder through a link.
    """
    if not is_plain(name):
        raise CheckpointError(f"{folder}: the file name {brief(name)} must be a plain path inside the folder")
    real = Path(os.path.realpath(folder / name))
    home = Path(os.path.realpath(folder))
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{folder}: {name!r} is a link to {real}, outside the folder; put the file itself there")
    return folder / name


def open_file(path: Path) -> int:
    """A descriptor of a regular file, open for reading. Nothing else is waited for, and nothing else is read.

    Raises:
        CheckpointError: it is missing, cannot be read, or is a folder, a pipe, a socket or a device.
    """
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return descriptor


def destination(path: str | Path) -> Path:
    """A place to write to, of which nothing need be there yet.

    Raises:
        CheckpointError: no file system takes such a name.
    """
    if not str(path):
        raise CheckpointError("the empty path names no place to write to; choose a name")
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r} holds a NUL character, which no path can; choose another name")
    try:
        Path(path).exists()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); choose another name") from error
    return Path(path)


def read_small(path: Path, limit: int = 100_000_000) -> bytes:
    """The contents of a file of at most `limit` bytes.

    Raises:
        CheckpointError: it is missing, cannot be read, is no regular file, or is longer.
    """
    descriptor = open_file(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{path} is longer than {limit} bytes, which no such file is")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    finally:
        os.close(descriptor)


def is_plain(name: str) -> bool:
    """A relative path of POSIX in its shortest form, of characters that can be printed."""
    pure = PurePosixPath(name)
    inside = not pure.is_absolute() and ".." not in pure.parts and pure.name not in ("", ".")
    return inside and name.isprintable() and "\\" not in name and str(pure) == name
