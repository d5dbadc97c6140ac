"""What the files of a Hugging Face folder hold, as one number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areno_fn.ckpt.folder import HFFolder
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import digest

_AT_ONCE = 8


def content_of(folder: HFFolder, beside: Iterable[str] = ()) -> str:
    """A digest of the configuration and of every byte of the weights; where the folder lies is no part of it.

    Args:
        beside: names of further files of the folder that count.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = [*sorted(folder.store.files), *sorted(beside)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sums = list(pool.map(_sha256, [folder.path / name for name in names]))
    return digest([dict(folder.config), list(zip(names, sums, strict=True))])


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); it must stay where it is while a run needs it"
        ) from None
