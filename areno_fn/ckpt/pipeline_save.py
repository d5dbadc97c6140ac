"""Writing a pipeline folder: the parts that were trained, and everything else as it stands in the source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from areno_fn.ckpt import atomic, disk
from areno_fn.ckpt.paths import destination, member, open_file
from areno_fn.ckpt.pipeline import INDEX
from areno_fn.contracts.errors import CheckpointError

_BESIDE = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_PIECE = 16 << 20


def save_pipeline(
    out: str | Path, source: Path, parts: Mapping[str, Path], trained: Mapping[str, Callable[[Path], object]]
) -> Path:
    """Writes a folder that diffusers reads as a pipeline. It appears whole, or the old one stays.

    Args:
        out: the folder. One that is there is replaced, if it holds nothing but what such a folder holds.
        source: the pipeline's folder, whose model_index.json and licence are carried over.
        parts: where every part lies that was not trained; all of its files are copied.
        trained: of every trained part, what writes it into the folder that it is given.

    Returns:
        The folder.

    Raises:
        CheckpointError: a file cannot be read, `out` holds other things, or the disk refuses.
    """
    beside = [name for name in sorted(os.listdir(source)) if name.upper().startswith(_BESIDE)]
    beside = [INDEX, *(name for name in beside if (source / name).is_file())]
    _require_replaceable(destination(out), {*beside, *parts, *trained})
    with atomic.folder(Path(out)) as scratch:
        for name in beside:
            _copy(member(source, name), scratch / name)
        for name, folder in parts.items():
            _copy_folder(source, folder, scratch / name)
        for name, write in trained.items():
            write(scratch / name)
    return Path(out)


def _require_replaceable(out: Path, names: set[str]) -> None:
    held = sorted(os.listdir(out)) if out.is_dir() else []
    others = [name for name in held if name not in names]
    if others or (held and INDEX not in held):
        raise CheckpointError(
            f"{out} holds {(others or held)[0]}, which would be lost; move it or write to another folder"
        )


def _copy_folder(source: Path, folder: Path, target: Path) -> None:
    inside = folder.is_relative_to(source)
    disk.make_folder(target)
    for place, (found, names, files) in enumerate(os.walk(folder)):
        here = target / Path(found).relative_to(folder)
        if place:
            disk.make_folder(here)
        names.sort()
        for name in sorted(files):
            path = Path(found) / name
            root = source if inside else folder
            _copy(member(root, path.relative_to(root).as_posix()), here / name)
        disk.sync_folder(here)


def _copy(source: Path, target: Path) -> None:
    descriptor = disk.create(target)
    try:
        for piece in _pieces(source):
            atomic.write_all(descriptor, memoryview(piece))
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(path: Path) -> Iterator[bytes]:
    descriptor = open_file(path)
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    finally:
        os.close(descriptor)
