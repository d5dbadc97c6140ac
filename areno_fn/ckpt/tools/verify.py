"""`verify DIR`: everything that is wrong with a checkpoint, at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areno_fn.ckpt.folder import CONFIG, GENERATION
from areno_fn.ckpt.header import Header, read_header, strict_json
from areno_fn.ckpt.paths import member, read_small
from areno_fn.ckpt.peft import open_adapter
from areno_fn.ckpt.store import INDEX, SINGLE, Store, open_store
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.tools.numbers import Side, looked_at
from areno_fn.ckpt.tools.pieces import piece, summed
from areno_fn.ckpt.tools.source import Source, kind_of
from areno_fn.ckpt.tools.text import many
from areno_fn.ckpt.verify import state_problems
from areno_fn.contracts.errors import CheckpointError

_LONGEST_CONFIG = 10_000_000


def problems(path: str | Path) -> list[str]:
    """Everything that is wrong, a sentence each; empty when all of it can be relied on.

    Raises:
        CheckpointError: there is nothing that could be checked.
    """
    place = Path(path)
    kind = kind_of(path)
    if kind == "folder":
        return list(_folder(place))
    if kind == "state":
        return state_problems(place)
    try:
        _ = open_adapter(place) if kind == "adapter" else read_header(place)
    except CheckpointError as error:
        return [str(error)]
    return []


def not_finite(source: Source) -> list[str]:
    """Every tensor that holds NaN or infinity, a sentence each; all tensors are read."""
    with Reader() as reader:

        def work(name: str, first: int) -> Side:
            return looked_at(piece(reader, source.header(name), name, first))

        sides = summed(work, {name: source.entry(name).spec.numel for name in source.files}, Side())
    return [
        f"{source.files[name]}: {name!r} holds {side.nan} NaN and {side.inf} infinite of {source.entry(name).spec.numel}"
        for name, side in sides.items()
        if side.nan or side.inf
    ]


def hashes(path: Path) -> Iterator[tuple[str, str]]:
    """SHA-256 and name of every file of a folder, or of one file.

    Raises:
        CheckpointError: a file cannot be read, or is a link to a place outside the folder.
    """
    files = [path] if path.is_file() else sorted(inner for inner in path.rglob("*") if inner.is_file())
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        if file != path:
            member(path, name)
        try:
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror or error})") from error
        yield digest.hexdigest(), name


def good(source: Source) -> str:
    """What was found to be in order, for the line that says so."""
    return f"{many(len(source.files), 'tensor')} in {many(len(source.headers), 'file')}"


def _folder(folder: Path) -> Iterator[str]:
    yield from _configs(folder)
    names, damaged = _weight_files(folder)
    yield from damaged
    headers = {}
    for name in names:
        try:
            headers[name] = read_header(member(folder, name))
        except CheckpointError as error:
            yield str(error)
    if len(headers) == len(names) and not damaged:
        yield from _weights(folder)
    yield from _formats(headers)
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in names and names:
            yield f"{path} is no part of the checkpoint: {INDEX if (folder / INDEX).exists() else SINGLE} does not need it"


def _configs(folder: Path) -> Iterator[str]:
    for name in (CONFIG, GENERATION):
        path = folder / name
        if not path.exists():
            if name == CONFIG:
                yield f"{folder} has no {CONFIG}, so nothing can say what its tensors are"
            continue
        try:
            values = strict_json(read_small(member(folder, name), _LONGEST_CONFIG), str(path))
        except CheckpointError as error:
            yield str(error)
            continue
        if not isinstance(values, dict):
            yield f"{path} holds a JSON {type(values).__name__}, it must be an object"
        elif name == CONFIG and not isinstance(values.get("model_type"), str):
            yield f"{path} has no model_type, so nothing can say what its tensors are"


def _weight_files(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the files that must be there, and why they cannot be known."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        return [SINGLE], [f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is not meant"]
    if not index.exists():
        return [SINGLE], []
    try:
        values = strict_json(read_small(member(folder, INDEX)), str(index))
    except CheckpointError as error:
        return [], [str(error)]
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        return [], [f"{index} needs a weight_map from tensor names to file names"]
    return sorted(set(weight_map.values())), []


def _weights(folder: Path) -> Iterator[str]:
    try:
        store = open_store(folder)
    except CheckpointError as error:
        yield str(error)
        return
    if store.index_metadata is not None:
        yield from _total_size(store, store.index_metadata)


def _total_size(store: Store, metadata: Mapping[str, Any]) -> Iterator[str]:
    total = sum(store.entry(name).nbytes for name in store.places)
    said = metadata.get("total_size", "not said")
    if type(said) is not int or said != total:
        yield f"{store.folder / INDEX}: total_size is {said}, its tensors have {total} bytes"


def _formats(headers: Mapping[str, Header]) -> Iterator[str]:
    for header in headers.values():
        if header.metadata.get("format") not in ("pt", "tf", "flax", "mlx"):
            yield f"{header.path} has no metadata 'format', without which transformers may refuse it; 'pt' would be right"
