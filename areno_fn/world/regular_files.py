"""What is read as a file must be one: a pipe is waited for and read once, and a device has no end."""

from __future__ import annotations

import errno
from pathlib import Path


def require_regular(path: Path) -> None:
    """Refuses what is there and is neither a regular file nor a folder, whose readers say so themselves.

    Raises:
        OSError: as of a file that cannot be read.
        ValueError: no path is written so.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file")
