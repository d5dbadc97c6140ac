"""Which files may be read as part of a folder, those that are in it, and how small ones are read."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from areno_fn.contracts.errors import CheckpointError


def member(folder: Path, name: str) -> Path:
    """The path of a file that a folder, or an index in it, names.

    A link may point to another place in the folder. The cache of the Hugging Face hub keeps the contents of
    `snapshots/<revision>` in `blobs` beside `snapshots`; links of a snapshot into it are followed too.

    Raises:
        CheckpointError: the name is absolute, climbs with `..`, or leaves the folder through a link.
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts or pure.name in ("", "."):
        raise CheckpointError(f"{folder}: the file name {name!r} must be a plain path inside the folder")
    real = Path(os.path.realpath(folder / name))
    home = Path(os.path.realpath(folder))
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{folder}: {name!r} is a link to {real}, outside the folder; put the file itself there")
    return folder / name


def read_small(path: Path, limit: int = 100_000_000) -> bytes:
    """The contents of a file of at most `limit` bytes.

    Raises:
        CheckpointError: it is missing, cannot be read, or is longer.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    if len(data) > limit:
        raise CheckpointError(f"{path} is longer than {limit} bytes, which no such file is")
    return data
