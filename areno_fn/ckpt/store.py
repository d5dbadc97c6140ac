"""The weights of a folder: one safetensors file, or several and an index that is read as law."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from areno_fn.ckpt.header import Entry, Header, read_header
from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.naming import DIFFUSERS, NAMINGS, TRANSFORMERS, Naming
from areno_fn.ckpt.paths import member, read_small
from areno_fn.ckpt.words import brief, listed
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec

SINGLE = TRANSFORMERS.single
INDEX = TRANSFORMERS.index


@attrs.frozen
class Store:
    """Where every tensor of a folder is.

    Attributes:
        folder: the folder.
        files: header of each file, by its name in the folder.
        places: the file that holds each tensor.
        index_metadata: the metadata of the index; None when there is a single file and no index.
        naming: what its files are called.
        specs: shape and dtype of every tensor.
    """

    folder: Path
    files: Mapping[str, Header]
    places: Mapping[str, str]
    index_metadata: Mapping[str, Any] | None = None
    naming: Naming = TRANSFORMERS
    specs: Mapping[str, TensorSpec] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "specs", {name: self.entry(name).spec for name in self.places})

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the files, merged."""
        return {key: value for header in self.files.values() for key, value in header.metadata.items()}

    def header(self, name: str) -> Header:
        """The header of the file that holds a tensor."""
        return self.files[self.places[name]]

    def entry(self, name: str) -> Entry:
        """Where in its file a tensor is."""
        return self.header(name).entries[name]


def open_store(folder: Path) -> Store:
    """Reads and checks the headers of a folder's weights; no byte of a tensor.

    Raises:
        CheckpointError: there are no safetensors weights, or two sets of them; a file is damaged; the index
            and the files do not say the same, in which case every offending file and tensor is listed.
    """
    found = [
        (naming, name) for naming in NAMINGS for name in (naming.single, naming.index) if os.path.lexists(folder / name)
    ]
    if not found:
        raise CheckpointError(_why_no_weights(folder))
    (naming, name), *others = found
    if others:
        raise CheckpointError(f"{folder} holds both {name} and {others[0][1]}; remove the one that is not meant")
    if name == naming.index:
        return _open_sharded(folder, naming)
    header = read_header(member(folder, name))
    return Store(folder, {name: header}, dict.fromkeys(header.entries, name), naming=naming)


def _open_sharded(folder: Path, naming: Naming) -> Store:
    path = member(folder, naming.index)
    weight_map, metadata = _read_index(path)
    headers, damaged = _read_headers(folder, sorted(set(weight_map.values())))
    missing = [name for name, fault in damaged.items() if not fault]
    problems = [fault for fault in damaged.values() if fault] + _index_problems(weight_map, headers)
    if missing:
        lost = sum(1 for file in weight_map.values() if file in missing)
        shown = ", ".join(missing[:20])
        problems.insert(0, f"it names files that are not there: {shown} ({lost} tensors); copy them into the folder")
    if problems:
        raise CheckpointError(f"{path} does not agree with its files: {listed(problems)}")
    return Store(folder, headers, weight_map, metadata, naming)


def _read_headers(folder: Path, names: Iterable[str]) -> tuple[dict[str, Header], dict[str, str]]:
    """The headers of the files that can be read, and what is wrong with each other one; nothing for one not there."""
    headers: dict[str, Header] = {}
    damaged: dict[str, str] = {}
    for name in names:
        try:
            path = member(folder, name)
            if not name.endswith(".safetensors"):
                damaged[name] = f"{brief(name)} is not the name of a safetensors file"
            elif not os.path.exists(path):
                damaged[name] = ""
            else:
                headers[name] = read_header(path)
        except CheckpointError as error:
            damaged[name] = str(error)
    return headers, damaged


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    values = strict_json(read_small(path), str(path), finite=True)
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path} needs a weight_map from tensor names to file names")
    metadata = values.get("metadata", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: metadata must be an object, received {brief(metadata)}")
    return weight_map, metadata


def _index_problems(weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> list[str]:
    """Tensors that are not where the index says, among the files that could be read."""
    found: dict[str, list[str]] = {}
    for file, header in headers.items():
        for tensor in header.entries:
            found.setdefault(tensor, []).append(file)
    problems = []
    for tensor, file in weight_map.items():
        holders = found.get(tensor, [])
        if not holders and file in headers:
            problems.append(f"{brief(tensor)} should be in {file}, it is in none")
        elif holders and holders != [file]:
            wanted = file if file in headers else brief(file)
            problems.append(f"{brief(tensor)} should be in {wanted} alone, it is in {' and '.join(holders)}")
    unclaimed = [name for name in found if name not in weight_map]
    problems += [f"{brief(name)} in {' and '.join(found[name])} is not in the index" for name in unclaimed]
    return problems


def _why_no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]
    if others:
        return f"{folder} has weights only as {_shown(others)}; only safetensors are read, so convert them first"
    loose = [name for name in names if name.endswith(".safetensors")]
    usual = _usual(folder, loose)
    if loose:
        return f"{folder} has {_shown(loose)}, but neither {usual.single} nor {usual.index}"
    return f"{folder} has no weights: neither {usual.single} nor {usual.index}"


def _usual(folder: Path, loose: list[str]) -> Naming:
    """How the files of a folder would be called: as those that are there, or as its configuration is of diffusers or not."""
    if any(name.startswith(DIFFUSERS.stem) for name in loose):
        return DIFFUSERS
    try:
        config = strict_json(read_small(member(folder, "config.json")), "")
    except CheckpointError:
        return TRANSFORMERS
    return DIFFUSERS if isinstance(config, dict) and "_class_name" in config else TRANSFORMERS


def _shown(names: list[str]) -> str:
    rest = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:20]) + rest
