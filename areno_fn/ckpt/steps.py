"""The folders of resumable state of one run: which is the newest complete one, and which may go."""

from __future__ import annotations

import os
import re
from pathlib import Path

from areno_fn.ckpt import atomic
from areno_fn.ckpt.manifest import is_readable, read_manifest
from areno_fn.ckpt.paths import destination
from areno_fn.contracts.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")


def folder_of(root: Path, step: int) -> Path:
    """Where the state of a step is."""
    return root / f"step-{step:08d}"


def latest(root: str | Path) -> Path | None:
    """The newest complete state of a run; None when there has been none.

    Raises:
        CheckpointError: there are states, but none is complete: continuing would restart the run unnoticed; or one
            was written by a release that this one does not understand, or has the name of another step; or `root` is
            there and no folder.
    """
    present = _newest_first(Path(root))
    for folder in present:
        if is_complete(folder):
            return _named_rightly(folder)
    if present:
        raise CheckpointError(
            f"{root} holds {', '.join(f.name for f in present)}, but none is complete; remove them to start anew"
        )
    return None


def is_complete(folder: Path) -> bool:
    """Whether a manifest is there, and every file has the length it names. Checksums are left to reading.

    Raises:
        CheckpointError: it was written by a release that this one does not understand.
    """
    if not is_readable(folder):
        return False
    return all(_has_size(folder / file.name, file.size) for file in read_manifest(folder).files)


def prune(root: Path, written: Path, keep: int) -> None:
    """Removes what interrupted removals left, and what is older than the newest `keep` complete states.

    Args:
        written: a folder that stays in any case.

    Raises:
        CheckpointError: the disk refuses.
    """
    atomic.sweep(root, "step-*")
    complete = 0
    for folder in _newest_first(root):
        if complete >= keep and folder != written:
            atomic.retire(folder)
        elif is_complete(folder):
            complete += 1


def _named_rightly(folder: Path) -> Path:
    """Under the name of a later step it would stay the newest, whatever was saved after it."""
    step = read_manifest(folder).step
    if folder != folder_of(folder.parent, step):
        raise CheckpointError(f"{folder} holds the state of step {step}; call it {folder_of(folder.parent, step).name}")
    return folder


def _newest_first(root: Path) -> list[Path]:
    if not destination(root).is_dir():
        if os.path.lexists(root):  # a link whose target has gone, for example
            raise CheckpointError(f"{root} is not a folder; states are looked for in one")
        return []
    for aside in root.glob(".step-*.replaced"):
        atomic.restore(root / aside.name.removeprefix(".").removesuffix(".replaced"))
    numbered = [(int(found[1]), path) for path in root.iterdir() if (found := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
