"""What a folder of resumable state says about itself: all of it is known before a byte of a tensor is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from areno_fn.ckpt.header import DTYPE_NAMES, DTYPES, read_header
from areno_fn.ckpt.paths import read_small
from areno_fn.ckpt.trees import VERSION as TREE_VERSION
from areno_fn.ckpt.trees import Values
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.layout import TensorSpec
from areno_fn.contracts.roles import Role

VERSION = 2
MANIFEST = "manifest.msgpack"

FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.~%-]+\.safetensors\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Size = Annotated[int, Meta(ge=0)]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that a manifest is made of."""


class StoredTensor(_Struct, frozen=True, kw_only=True):
    """Shape and dtype of a tensor; the dtype by its name in safetensors files."""

    dtype: str
    shape: tuple[Size, ...]

    @property
    def spec(self) -> TensorSpec:
        """The same as a `TensorSpec`."""
        return TensorSpec(self.shape, DTYPES[self.dtype])

    @staticmethod
    def of(spec: TensorSpec) -> StoredTensor:
        """What describes a tensor of this spec, whose dtype is known."""
        assert spec.dtype is not None, "a tensor in memory has a dtype"
        return StoredTensor(dtype=DTYPE_NAMES[spec.dtype], shape=spec.shape)


class DataFile(_Struct, frozen=True, kw_only=True):
    """A file of tensors, and how to tell that it is whole.

    Attributes:
        name: without a folder.
        size: in bytes.
        sha256: of all its bytes.
        tensors: what is in it, by path in the state. Those of `optim.actor.safetensors` are what the optimizer
            of role `actor` keeps.
    """

    name: FileName
    size: Size
    sha256: Sha256
    tensors: dict[str, StoredTensor]


class Manifest(_Struct, frozen=True, kw_only=True):
    """What a folder of state says about itself.

    Attributes:
        version: of this description.
        step: the number in the folder's name.
        identity: the run that the state belongs to.
        roles: who owns which parameters; None in folders of version 1, which did not say.
        files: the tensors, a file for each part of the state.
        values: everything in the state that is not a tensor, and which tensors are one and the same.
    """

    version: int
    step: Size
    identity: RunIdentity
    roles: tuple[Role, ...] | None
    files: tuple[DataFile, ...]
    values: Values

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor of the state by its path, aliases included."""
        stored = {path: tensor.spec for file in self.files for path, tensor in file.tensors.items()}
        return stored | {path: stored[owner] for path, owner in self.values.aliases.items()}

    @property
    def optimizers(self) -> dict[str, dict[str, TensorSpec]]:
        """What the optimizer of each role keeps: shape and dtype by path in the optimizer's state."""
        specs = self.specs
        names = [file.name.removesuffix(".safetensors") for file in self.files]
        roles = [unquote(name.removeprefix("optim.")) for name in names if name.startswith("optim.")]
        return {role: _below(f"optim.{role}", specs) for role in roles}


def _below(start: str, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {
        path.removeprefix(start).lstrip("."): spec for path, spec in specs.items() if f"{path}.".startswith(f"{start}.")
    }


class OtherVersionError(CheckpointError):
    """The folder was written by a release that this one does not understand."""


class _Sealed(msgspec.Struct, kw_only=True):
    """The file itself: a manifest as it was encoded, and its SHA-256. In version 1 it was the bare manifest."""

    version: int
    sha256: str = ""
    manifest: bytes = b""


class _FirstFile(_Struct, frozen=True, kw_only=True):
    name: FileName
    size: Size
    sha256: Sha256


class _FirstManifest(_Struct, frozen=True, kw_only=True):
    """Version 1: one file, whose header alone says what is in it."""

    version: int
    step: Size
    identity: RunIdentity
    file: _FirstFile
    values: Values


def encode(manifest: Manifest) -> bytes:
    """The contents of a manifest file."""
    body = msgspec.msgpack.encode(manifest)
    return msgspec.msgpack.encode(
        _Sealed(version=manifest.version, sha256=hashlib.sha256(body).hexdigest(), manifest=body)
    )


def read_manifest(folder: str | Path) -> Manifest:
    """Reads what a folder of state says about itself; folders of version 1 are understood.

    Raises:
        CheckpointError: there is none, it is damaged, contradicts itself, or is of another version.
    """
    path = Path(folder) / MANIFEST
    data = read_small(path)
    sealed: _Sealed = _decoded(path, data, _Sealed)
    if sealed.version == 1:
        manifest = _upgraded(Path(folder), _decoded(path, data, _FirstManifest))
    elif sealed.version == VERSION:
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            raise CheckpointError(f"{path} is damaged: its contents do not have the SHA-256 that it names")
        manifest = _decoded(path, sealed.manifest, Manifest)
    else:
        raise OtherVersionError(
            f"{folder} has version {sealed.version}, this library reads versions 1 and {VERSION}; use the release that wrote it"
        )
    problems = list(_contradictions(manifest))
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    return manifest


def is_readable(folder: Path) -> bool:
    """Whether the manifest is there and whole.

    Raises:
        CheckpointError: it is of another version, so that nothing can be said about the folder.
    """
    try:
        read_manifest(folder)
    except OtherVersionError:
        raise
    except CheckpointError:
        return False
    return True


def _decoded(path: Path, data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _upgraded(folder: Path, old: _FirstManifest) -> Manifest:
    entries = read_header(folder / old.file.name).entries
    tensors = {name: StoredTensor.of(entry.spec) for name, entry in entries.items()}
    file = DataFile(name=old.file.name, size=old.file.size, sha256=old.file.sha256, tensors=tensors)
    return Manifest(version=1, step=old.step, identity=old.identity, roles=None, files=(file,), values=old.values)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """In what a manifest cannot be right, whatever the files hold."""
    values = manifest.values
    if values.version != TREE_VERSION:
        yield f"its values have version {values.version}, this library reads version {TREE_VERSION}"
    stored = [path for file in manifest.files for path in file.tensors]
    for name in _repeated(file.name for file in manifest.files):
        yield f"it names the file {name} twice"
    for path in _repeated([*stored, *values.aliases, *values.scalars]):
        yield f"it holds {path!r} twice"
    for file in manifest.files:
        for path, tensor in file.tensors.items():
            if tensor.dtype not in DTYPES:
                yield f"{path!r} has dtype {tensor.dtype!r}, known are {', '.join(DTYPES)}"
    known = set(stored)
    for path, owner in values.aliases.items():
        if owner not in known:
            yield f"{path!r} is stored as {owner!r}, which is not there"


def _repeated(names: Any) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
