"""Anything that holds tensors, opened by its headers: a Hugging Face folder, resumable state, an adapter, one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec

from areno_fn.ckpt import atomic, peft
from areno_fn.ckpt.folder import CONFIG, open_folder
from areno_fn.ckpt.header import Entry, Header, read_header
from areno_fn.ckpt.manifest import MANIFEST, Manifest, read_manifest
from areno_fn.ckpt.naming import NAMINGS
from areno_fn.ckpt.peft import AdapterFolder, open_adapter
from areno_fn.ckpt.resume import checked_header
from areno_fn.ckpt.store import Store, open_store
from areno_fn.contracts.errors import CheckpointError

Kind = Literal["folder", "state", "adapter", "file"]
WORDS: dict[Kind, str] = {
    "folder": "Hugging Face folder",
    "state": "resumable state",
    "adapter": "PEFT adapter",
    "file": "safetensors file",
}
_WEIGHTS: dict[str, Kind] = {name: "folder" for naming in NAMINGS for name in (naming.index, naming.single)}
_MARKS: dict[str, Kind] = {
    MANIFEST: "state",
    **_WEIGHTS,
    peft.CONFIG: "adapter",
    CONFIG: "folder",
    peft.DIFFUSERS: "adapter",
}
"""The first that is there decides: an adapter may stand beside the configuration of its model, but not its weights."""

_MOST_NAMED = 8


@attrs.frozen(kw_only=True)
class Source:
    """Tensors on disk, and what stands beside them.

    Attributes:
        path: the folder or file.
        kind: what it is.
        headers: the header of every file, by its name in the folder.
        files: the name of the file that holds each tensor.
        config: the contents of config.json or adapter_config.json; empty when there is none.
        values: what is no tensor in a state, by path; empty for others.
        store: of a Hugging Face folder.
        manifest: of a state.
        adapter: of an adapter.
    """

    path: Path
    kind: Kind
    headers: Mapping[str, Header]
    files: Mapping[str, str]
    config: Mapping[str, Any] = attrs.field(factory=dict)
    values: Mapping[str, Any] = attrs.field(factory=dict)
    store: Store | None = None
    manifest: Manifest | None = None
    adapter: AdapterFolder | None = None

    def header(self, name: str) -> Header:
        """The header of the file that holds a tensor."""
        return self.headers[self.files[name]]

    def entry(self, name: str) -> Entry:
        """Where in its file a tensor is."""
        return self.header(name).entries[name]


def kind_of(path: str | Path) -> Kind:
    """What stands at a path, judged by the names of files alone.

    Raises:
        CheckpointError: nothing, or nothing that holds tensors; names what is below it that does.
    """
    if not str(path):
        raise CheckpointError("the empty path names no checkpoint; write . for this folder")
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r} holds a NUL character, which no path can")
    place = Path(path)
    try:
        atomic.restore(place)
        if place.is_file():
            if place.suffix != ".safetensors":
                raise CheckpointError(f"{place} is not a .safetensors file; only those and folders of them are read")
            return "file"
        if not place.is_dir():
            what = "is neither a file nor a folder" if place.exists() else "is not there"
            raise CheckpointError(f"{place} {what}; a folder of a checkpoint or a .safetensors file is needed")
        for mark, kind in _MARKS.items():
            if (place / mark).exists():
                return kind
        raise CheckpointError(f"{place} holds no checkpoint{_what_does(place)}")
    except OSError as error:
        raise CheckpointError(f"{place} cannot be opened ({error.strerror or error})") from error


def open_source(path: str | Path) -> Source:
    """Opens what stands at a path: every header is read and checked, but no byte of a tensor.

    Raises:
        CheckpointError: it is nothing that holds tensors, or it is damaged.
    """
    place = Path(path)
    kind = kind_of(path)
    if kind == "file":
        header = read_header(place)
        return _of(place, kind, {place.name: header})
    if kind == "state":
        return _state(place)
    if kind == "adapter":
        adapter = open_adapter(place)
        return _of(place, kind, {adapter.header.path.name: adapter.header}, adapter=adapter)
    if not (place / CONFIG).exists():
        store = open_store(place)
        return _of(place, kind, store.files, store=store)
    folder = open_folder(place)
    return _of(place, kind, folder.store.files, config=folder.config, store=folder.store)


def _of(path: Path, kind: Kind, headers: Mapping[str, Header], **others: Any) -> Source:
    files = {name: file for file, header in headers.items() for name in header.entries}
    return Source(path=path, kind=kind, headers=headers, files=files, **others)


def _state(folder: Path) -> Source:
    manifest = read_manifest(folder)
    headers = {file.name: checked_header(folder, file) for file in manifest.files}
    aliases = {path: f"the same tensor as {owner}" for path, owner in manifest.values.aliases.items()}
    identity = {f"identity.{k}": v for k, v in msgspec.to_builtins(attrs.asdict(manifest.identity)).items()}
    values = {**manifest.values.scalars, **aliases, **identity}
    return _of(folder, "state", headers, values=values, manifest=manifest)


def _what_does(place: Path) -> str:
    below = sorted({path.parent for mark in _MARKS for path in (*place.glob(f"*/{mark}"), *place.glob(f"*/*/{mark}"))})
    shown = [str(path) for path in below[-_MOST_NAMED:]]
    if shown:
        return f" itself, but {', '.join(shown)} {'does' if len(shown) == 1 else 'do'}"
    loose = sorted(path.name for path in place.glob("*.safetensors"))
    return f", only the files {', '.join(loose[:_MOST_NAMED])}; name one of them" if loose else ""
