"""Resumable state: every tensor and number of a `TrainState`, in folders that are whole or not there.

A root holds folders `step-00000012`, each with the tensors in one safetensors file and a manifest that names
the run, everything that is not a tensor, and the length and SHA-256 of the file. The manifest is written last,
then the folder gets its name, then older ones go.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

import msgspec
import torch

from areno_fn.ckpt import atomic
from areno_fn.ckpt.header import Header, read_header
from areno_fn.ckpt.paths import read_small
from areno_fn.ckpt.tensorfile import Reader, memory, write_tensors
from areno_fn.ckpt.trees import Values, flatten, rebuild, require_consistent, require_like
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.layout import spec_of
from areno_fn.contracts.state import TrainState

VERSION = 1
MANIFEST = "manifest.msgpack"
DATA = "state.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


class DataFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of tensors, and how to tell that it is whole."""

    name: Literal["state.safetensors"] = "state.safetensors"
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a folder of state says about itself.

    Attributes:
        version: of this description.
        step: the number in the folder's name.
        identity: the run that the state belongs to.
        file: its tensors.
        values: everything in the state that is not a tensor.
    """

    version: int
    step: int
    identity: RunIdentity
    file: DataFile
    values: Values


def save_state(root: str | Path, step: int, state: TrainState, identity: RunIdentity, keep: int = 2) -> Path:
    """Writes a state, and removes the oldest ones once it is whole.

    Args:
        root: folder of all states of a run; made when it is missing.
        step: a number that grows with the run; a state with the same number is replaced.
        state: the state; tensors may be on any device and may share storage.
        identity: the run it belongs to.
        keep: how many of the newest states stay, the new one included.

    Returns:
        The folder of the new state.

    Raises:
        CheckpointError: the state cannot be stored, or the disk refuses; older states are untouched.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(f"step must be at least 0 and keep at least 1, received {step} and {keep}")
    folder = Path(root) / f"step-{step:08d}"
    flat = flatten(state)
    specs = {name: spec_of(tensor) for name, tensor in flat.tensors.items()}
    digest = hashlib.sha256()
    with atomic.folder(folder) as scratch:
        size = write_tensors(scratch / DATA, specs, flat.tensors.__getitem__, {"format": "pt"}, digest.update)
        file = DataFile(size=size, sha256=digest.hexdigest())
        manifest = Manifest(version=VERSION, step=step, identity=identity, file=file, values=flat.values)
        atomic.write_file(scratch / MANIFEST, msgspec.msgpack.encode(manifest))
    _prune(Path(root), folder, keep)
    return folder


def latest(root: str | Path) -> Path | None:
    """The newest complete state of a run; None when there has been none.

    Raises:
        CheckpointError: there are states, but none is complete: continuing would restart the run unnoticed.
    """
    present = _newest_first(Path(root))
    for folder in present:
        if _is_complete(folder):
            return folder
    if present:
        raise CheckpointError(
            f"{root} holds {', '.join(f.name for f in present)}, but none is complete; remove them to start anew"
        )
    return None


def read_manifest(folder: str | Path) -> Manifest:
    """Reads what a folder of state says about itself.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    manifest = _decoded(Path(folder) / MANIFEST)
    if manifest.version != VERSION:
        raise CheckpointError(f"{folder} has version {manifest.version}, this library reads version {VERSION}")
    return manifest


def load_state(
    path: str | Path, like: TrainState, identity: RunIdentity, device: torch.device | str = "cpu"
) -> TrainState:
    """Reads a state back, bit for bit.

    The manifest, the identity, the header and every path, shape and dtype are compared before a tensor is
    read; the checksum before anything is returned.

    Args:
        path: a folder that `save_state` or `latest` returned.
        like: a state of the same structure, whose tensors may be meta tensors.
        identity: the run that wants to continue.
        device: for tensors that are meta tensors in `like`; others go where the one in `like` is.

    Raises:
        CheckpointError: damaged, of another run, or of another structure.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    identity.require(manifest.identity, str(folder))
    header = read_header(folder / DATA)
    if header.size != manifest.file.size:
        raise CheckpointError(f"{header.path} has {header.size} bytes, expected {manifest.file.size} by its manifest")
    require_consistent(str(folder), header, manifest.values)
    require_like(str(folder), header, manifest.values, like)
    tensors = _read_verified(header, manifest.file.sha256)
    return rebuild(like, tensors, manifest.values, device)


def _decoded(path: Path) -> Manifest:
    try:
        return msgspec.msgpack.decode(read_small(path), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _read_verified(header: Header, sha256: str) -> dict[str, torch.Tensor]:
    """All tensors, in the order of their bytes, which leave no gap: so the checksum is that of the whole file."""
    tensors = {}
    with Reader() as reader:
        digest = hashlib.sha256(reader.bytes(header, 0, header.data))
        for name in header.entries:
            tensors[name] = reader.read(header, name)
            digest.update(memory(tensors[name]))
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{header.path} is damaged: its SHA-256 is {digest.hexdigest()}, expected {sha256}")
    return tensors


def _newest_first(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    for aside in root.glob(".step-*.replaced"):
        atomic.restore(root / aside.name.removeprefix(".").removesuffix(".replaced"))
    numbered = [(int(found[1]), path) for path in root.iterdir() if (found := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _is_complete(folder: Path) -> bool:
    if not (folder / MANIFEST).is_file() or not (folder / DATA).is_file():
        return False
    try:
        return _decoded(folder / MANIFEST).file.size == (folder / DATA).stat().st_size
    except CheckpointError:
        return False


def _prune(root: Path, written: Path, keep: int) -> None:
    """Removes what interrupted removals left, and what is older than the newest `keep` complete states."""
    atomic.sweep(root, "step-*")
    complete = 0
    for folder in _newest_first(root):
        if complete >= keep and folder != written:
            atomic.retire(folder)
        elif _is_complete(folder):
            complete += 1
