"""Resumable state: every tensor and number of a `TrainState`, in folders that are whole or not there.

A root holds folders `step-00000012`, each with a safetensors file for every part of the state and a manifest that
names the run, its roles, everything that is not a tensor, and the length, SHA-256 and contents of each file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from areno_fn.ckpt import atomic, parts
from areno_fn.ckpt.digest import Digest
from areno_fn.ckpt.header import DTYPE_NAMES, Header, read_header
from areno_fn.ckpt.host import memory
from areno_fn.ckpt.manifest import (
    MANIFEST,
    VERSION,
    DataFile,
    Manifest,
    StoredTensor,
    encode,
    read_manifest,
)
from areno_fn.ckpt.paths import member
from areno_fn.ckpt.steps import folder_of, latest, prune
from areno_fn.ckpt.tensorfile import Reader, write_tensors
from areno_fn.ckpt.trees import Flat, differences, flatten, rebuild, require_none
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.layout import spec_of
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.state import TrainState

__all__ = ["Prepared", "checked_header", "latest", "load_state", "prepare", "role_differences", "save_state", "write"]


@attrs.frozen(kw_only=True)
class Prepared:
    """A state that can be written: found storable, and taken apart.

    Attributes:
        flat: its tensors, each once, and the rest.
        files: the paths of the tensors of each file.
        roles: who owns which parameters.
    """

    flat: Flat
    files: Mapping[str, Sequence[str]]
    roles: tuple[Role, ...]


def save_state(
    root: str | Path,
    step: int,
    state: TrainState,
    identity: RunIdentity,
    keep: int = 2,
    *,
    roles: RoleLayout | None = None,
) -> Path:
    """Writes a state, and removes the oldest ones once it is whole. `background.Writer` does so in a thread.

    Args:
        root: folder of all states of a run; made when it is missing.
        step: a number that grows with the run; a state with the same number is replaced.
        state: the state; tensors may be on any device and may share storage.
        identity: the run it belongs to.
        keep: how many of the newest states stay, the new one included.
        roles: who owns which parameters; without it the roles with an optimizer are the trainable ones.

    Returns:
        The folder of the new state.

    Raises:
        CheckpointError: the state cannot be stored, or the disk refuses; older states are untouched.
        RecordError: the state does not have the roles, or the update of one would show in another.
    """
    return write(root, step, prepare(state, roles), identity, keep)


def prepare(state: TrainState, roles: RoleLayout | None = None) -> Prepared:
    """Looks for whatever could keep a state from being stored, and takes it apart; nothing is copied.

    Raises:
        CheckpointError: it holds something that cannot be stored.
        RecordError: it does not have the roles.
    """
    if roles is not None:
        roles.check(state.params, optim=state.optim, snapshots=state.snapshots)
    flat = flatten(state)
    for path, tensor in flat.tensors.items():
        if tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path!r} is {spec_of(tensor)} on {tensor.device}, which cannot be stored")
    return Prepared(flat=flat, files=parts.files(state, flat.tensors), roles=_roles(state, roles))


def write(
    root: str | Path,
    step: int,
    prepared: Prepared,
    identity: RunIdentity,
    keep: int,
    watch: Callable[[], None] = lambda: None,
) -> Path:
    """Writes a prepared state; see `save_state`.

    Args:
        watch: called before every piece; what it raises ends the write, and older states are untouched.
    """
    if type(step) is not int or not 0 <= step < 1 << 63 or type(keep) is not int or keep < 1:
        raise CheckpointError(
            f"step must be an integer of at least 0 and keep one of at least 1, received {step!r} and {keep!r}"
        )
    folder = folder_of(Path(root), step)
    with atomic.folder(folder) as scratch:
        files = tuple(_write_file(scratch / name, prepared, paths, watch) for name, paths in prepared.files.items())
        manifest = Manifest(
            version=VERSION,
            step=step,
            identity=identity,
            roles=prepared.roles,
            files=files,
            values=prepared.flat.values,
        )
        # The manifest is the mark of completeness: it comes last, and names length and hash of all that came
        # before. An empty marker beside it would say less, and be one more name to lose.
        atomic.write_file(scratch / MANIFEST, encode(manifest))
    prune(Path(root), folder, keep)
    return folder


def load_state(
    path: str | Path,
    like: TrainState,
    identity: RunIdentity,
    device: torch.device | str = "cpu",
    *,
    roles: RoleLayout | None = None,
    accept: Sequence[str] = (),
) -> TrainState:
    """Reads a state back, bit for bit.

    The manifest, the identity, the roles, every path, shape and dtype, and the headers of the files are compared
    before a tensor is read; checksums before anything is returned.

    Args:
        path: a folder that `save_state` or `latest` returned.
        like: a state of the same structure, whose tensors may be meta tensors.
        identity: the run that wants to continue.
        device: for tensors that are meta tensors in `like`; others go where the one in `like` is.
        roles: who owns which parameters in that run.
        accept: fields of the identity that may differ.

    Raises:
        CheckpointError: damaged, of another run, or of another structure; names every difference.
        SpecError: a field that cannot be accepted.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    identity.require(manifest.identity, str(folder), accept)
    found = [] if manifest.roles is None else role_differences(manifest.roles, _roles(like, roles))
    require_none(str(folder), found + differences(manifest.specs, manifest.values, like))
    headers = [checked_header(folder, file) for file in manifest.files]
    with Reader() as reader:
        tensors: dict[str, torch.Tensor] = {}
        for file, header in zip(manifest.files, headers, strict=True):
            tensors |= _read_verified(reader, header, file.sha256)
    return rebuild(like, tensors, manifest.values, device)


def checked_header(folder: Path, file: DataFile) -> Header:
    """The header of a file of a state, which has the length and the tensors that the manifest names.

    Raises:
        CheckpointError: it has not; says in what.
    """
    header = read_header(member(folder, file.name))
    if header.size != file.size:
        raise CheckpointError(f"{header.path} has {header.size} bytes, expected {file.size} by its manifest")
    expected = {name: tensor.spec for name, tensor in file.tensors.items()}
    received = {name: entry.spec for name, entry in header.entries.items()}
    wrong = [
        f"{name!r} is {received.get(name, 'not there')}, expected {expected.get(name, 'nothing of that name')}"
        for name in dict.fromkeys([*expected, *received])
        if expected.get(name) != received.get(name)
    ]
    require_none(str(header.path), wrong)
    return header


def role_differences(saved: Sequence[Role], now: Sequence[Role]) -> list[str]:
    """Each difference between the roles of a saved state and those of a run, in words; their order does not matter."""
    before, after = {role.name: role for role in saved}, {role.name: role for role in now}
    found = [f"role {name!r} is not expected" for name in before if name not in after]
    found += [f"role {name!r} is missing" for name in after if name not in before]
    for name in before.keys() & after.keys():
        for field in ("trainable", "exported"):
            one, other = getattr(before[name], field), getattr(after[name], field)
            if one != other:
                found.append(f"role {name!r} has {field} = {one}, it should be {other}")
    return sorted(found)


def _roles(state: TrainState, roles: RoleLayout | None) -> tuple[Role, ...]:
    if roles is not None:
        return roles.roles
    return tuple(Role(name=name, trainable=name in state.optim) for name in state.params)


def _write_file(path: Path, prepared: Prepared, paths: Sequence[str], watch: Callable[[], None]) -> DataFile:
    tensors = prepared.flat.tensors
    specs = {name: spec_of(tensors[name]) for name in paths}
    described = {name: StoredTensor.of(spec) for name, spec in specs.items()}
    with Digest() as digest:

        def seen(piece: memoryview) -> None:
            watch()
            digest.update(piece)

        size = write_tensors(path, specs, tensors.__getitem__, {"format": "pt"}, seen)
        return DataFile(name=path.name, size=size, sha256=digest.hexdigest(), tensors=described)


def _read_verified(reader: Reader, header: Header, sha256: str) -> dict[str, torch.Tensor]:
    """All tensors, in the order of their bytes, which leave no gap: so the checksum is that of the whole file."""
    tensors = {}
    with Digest() as digest:
        digest.update(reader.bytes(header, 0, header.data))
        for name in header.entries:
            tensors[name] = reader.read(header, name)
            digest.update(memory(tensors[name]))
        found = digest.hexdigest()
    if found != sha256:
        raise CheckpointError(f"{header.path} is damaged: its SHA-256 is {found}, expected {sha256}")
    return tensors
