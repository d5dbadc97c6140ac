"""What the files of a folder hold, as one number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areno_fn.ckpt.folder import HFFolder
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import digest

_AT_ONCE = 8
_OF_PARTS = (".json", ".txt", ".model", ".jinja", ".safetensors", ".bin")


def content_of(folder: HFFolder, beside: Iterable[str] = ()) -> str:
    """A digest of the configuration and of every byte of the weights; where the folder lies is no part of it.

    Args:
        beside: names of further files of the folder that count.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = [*sorted(folder.store.files), *sorted(beside)]
    return digest([dict(folder.config), _sums(folder.path, names)])


def content_of_part(folder: Path) -> str:
    """A digest of every byte that a frozen part of a pipeline is read from; where it lies is no part of it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _OF_PARTS and path.is_file())
    return digest(_sums(folder, names))


def _sums(folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(zip(names, pool.map(_sha256, [folder / name for name in names]), strict=True))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); it must stay where it is while a run needs it"
        ) from None
