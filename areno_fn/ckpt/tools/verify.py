"""`verify DIR`: everything that is wrong with a checkpoint, at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from areno_fn.ckpt.folder import CONFIG, GENERATION
from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.paths import member, open_file, read_small
from areno_fn.ckpt.peft import open_adapter, open_twin
from areno_fn.ckpt.store import Store, open_store
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.tools.numbers import Side, looked_at
from areno_fn.ckpt.tools.pieces import Progress, piece, summed
from areno_fn.ckpt.tools.source import Source, kind_of
from areno_fn.ckpt.tools.text import many
from areno_fn.ckpt.tools.twins import twin_problems
from areno_fn.ckpt.verify import state_problems
from areno_fn.ckpt.words import brief
from areno_fn.contracts.errors import CheckpointError

_TYPES = ("model_type", "_class_name")  # of transformers, and of diffusers
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
        if kind == "adapter":
            return twin_problems(open_adapter(place))
        read_header(place)
    except CheckpointError as error:
        return [str(error)]
    return []


def not_finite(source: Source, progress: Progress | None = None) -> list[str]:
    """Every tensor that holds NaN or infinity, a sentence each; all tensors are read."""
    with Reader() as reader:

        def work(name: str, first: int) -> Side:
            return looked_at(piece(reader, source.header(name), name, first))

        sides = summed(work, {name: source.entry(name).spec.numel for name in source.files}, Side(), progress)
    return [
        f"{source.files[name]}: {name!r} holds {side.nan} NaN and {side.inf} infinite of {source.entry(name).spec.numel}"
        for name, side in sides.items()
        if side.nan or side.inf
    ]


def hashes(path: Path) -> Iterator[tuple[str, str]]:
    """SHA-256 and name of every file of a folder, or of one file.

    Raises:
        CheckpointError: a file cannot be read, or is a link to a place outside the folder, or to none.
    """
    files = [path] if path.is_file() else sorted(inner for inner in path.rglob("*") if not inner.is_dir())
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        if file != path:
            member(path, name)
        try:
            with os.fdopen(open_file(file), "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror or error})") from error
        yield digest.hexdigest(), name


def good(source: Source) -> str:
    """What was found to be in order, for the line that says so."""
    twin = None if source.adapter is None else open_twin(source.adapter)
    again = "" if twin is None else f", and the same in {twin.header.path.name}"
    return f"{many(len(source.files), 'tensor')} in {many(len(source.headers), 'file')}{again}"


def _folder(folder: Path) -> Iterator[str]:
    yield from _configs(folder)
    try:
        store = open_store(folder)
    except CheckpointError as error:
        yield str(error)
        return
    yield from _total_size(store)
    yield from _formats(store)
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in store.files:
            yield f"{path} is no part of the checkpoint, nothing names it; move it elsewhere"


def _configs(folder: Path) -> Iterator[str]:
    for name in (CONFIG, GENERATION):
        path = folder / name
        if not os.path.lexists(path):
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
        elif name == CONFIG and not any(isinstance(values.get(key), str) for key in _TYPES):
            yield f"{path} has no {' or '.join(_TYPES)}, so nothing can say what its tensors are"


def _total_size(store: Store) -> Iterator[str]:
    if store.index_metadata is None:
        return
    total = sum(store.entry(name).nbytes for name in store.places)
    said = store.index_metadata.get("total_size", "not said")
    if type(said) is not int or said != total:
        yield f"{store.folder / store.naming.index}: total_size is {brief(said)}, its tensors have {total} bytes"


def _formats(store: Store) -> Iterator[str]:
    for header in store.files.values():
        if header.metadata.get("format") not in ("pt", "tf", "flax", "mlx"):
            yield f"{header.path} has no metadata 'format', without which transformers may refuse it; 'pt' would be right"
