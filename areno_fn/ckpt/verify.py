"""Whether a folder of resumable state is whole: everything is read, and everything that is wrong is said at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areno_fn.ckpt.digest import Digest
from areno_fn.ckpt.manifest import MANIFEST, DataFile, Manifest, read_manifest
from areno_fn.ckpt.resume import checked_header
from areno_fn.contracts.errors import CheckpointError

_CHUNK = 1 << 24


def verify_state(folder: str | Path) -> Manifest:
    """Checks a folder of state: its manifest, and length, header and SHA-256 of every file. Needs no run to compare with.

    Returns:
        What the folder says about itself.

    Raises:
        CheckpointError: a line for each problem.
    """
    problems = state_problems(folder)
    if problems:
        raise CheckpointError("\n".join(problems))
    return read_manifest(folder)


def state_problems(folder: str | Path) -> list[str]:
    """Everything that is wrong with a folder of state, a sentence each; empty when it is whole."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    return list(_problems(Path(folder), manifest))


def _problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    for file in manifest.files:
        yield from _problems_of(folder, file)
    named = {MANIFEST, *(file.name for file in manifest.files)}
    for path in sorted(folder.iterdir()):
        if path.name not in named:
            yield f"{path} is not named by the manifest"


def _problems_of(folder: Path, file: DataFile) -> Iterator[str]:
    try:
        header = checked_header(folder, file)
    except CheckpointError as error:
        yield str(error)
        return
    with header.path.open("rb") as opened, Digest() as digest:
        while piece := opened.read(_CHUNK):
            digest.update(piece)
        found = digest.hexdigest()
    if found != file.sha256:
        yield f"{header.path} is damaged: its SHA-256 is {found}, expected {file.sha256}"
