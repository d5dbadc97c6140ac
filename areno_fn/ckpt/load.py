"""Reading a parameter tree out of a Hugging Face folder, one leaf at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.ckpt.dtypes import DtypePolicy, converted
from areno_fn.ckpt.folder import HFFolder
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, ParamLayout, Part, views_of

Progress = Callable[[int, int, int, int], None]
"""Called as `progress(done_tensors, total_tensors, done_bytes, total_bytes)`, of the tensors in the file."""


def require_fit(folder: HFFolder, iso: Iso, dtype: DtypePolicy = "source") -> None:
    """Compares the headers of a folder with what a layout claims, before any weight is read.

    Raises:
        CheckpointError: lists every tensor that is missing, not claimed, or of another shape or dtype, and
            every leaf that would be joined from tensors of several dtypes.
    """
    problems = ParamLayout(iso.source).differences(folder.specs)
    if problems:
        raise CheckpointError(f"{folder.path}: its tensors are not those of the model: {'; '.join(problems)}")
    mixed = [part for part in iso.parts if len({_loaded_dtype(folder, name, dtype) for name in part.source}) > 1]
    if mixed:
        shown = "; ".join(
            f"{', '.join(map(repr, part.target))} from "
            + ", ".join(f"{name!r} {folder.specs[name]}" for name in part.source)
            for part in mixed
        )
        raise CheckpointError(f"{folder.path}: these leaves join several dtypes, so load with one dtype: {shown}")


def load(
    folder: HFFolder,
    iso: Iso,
    *,
    like: Any = None,
    dtype: DtypePolicy = "source",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Any:
    """Reads a parameter tree, one leaf at a time.

    Args:
        folder: what `open_folder` returned.
        iso: from the tensors in the file to the leaves of the tree.
        like: a tree of the wanted structure, whose leaves may be meta tensors; their shapes are compared,
            their dtypes are not.
        dtype: what floating tensors become.
        device: where the leaves will be.
        progress: told after every leaf; the last call has done everything.

    Returns:
        A tree like `like`, or a dict from paths to tensors without one.

    Raises:
        CheckpointError: as for `require_fit`, or a file changed under the reader.
        LayoutError: `like` is not what the layout gives, or tied tensors differ.
    """
    require_fit(folder, iso, dtype)
    paths = None if like is None else dict(tree.leaves_with_path(like))
    if paths is not None:
        ParamLayout(iso.target).check(paths, "the leaves of the model")
    leaves = _load_leaves(folder, iso, dtype, torch.device(device), progress or _quiet)
    return leaves if paths is None else tree.unflatten(like, [leaves[path] for path in paths])


def _load_leaves(
    folder: HFFolder, iso: Iso, dtype: DtypePolicy, device: torch.device, progress: Progress
) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    done, done_bytes = 0, 0
    total_bytes = sum(folder.store.entry(name).nbytes for name in iso.source)
    progress(0, len(iso.source), 0, total_bytes)
    with Reader() as reader:
        for part in sorted(iso.parts, key=lambda part: _place(folder, part)):
            made |= _load_part(folder, reader, part, dtype, device)
            done += len(part.source)
            done_bytes += sum(folder.store.entry(name).nbytes for name in part.source)
            progress(done, len(iso.source), done_bytes, total_bytes)
    return {name: made[name] for name in iso.target}


def _load_part(
    folder: HFFolder, reader: Reader, part: Part, policy: DtypePolicy, device: torch.device
) -> dict[str, torch.Tensor]:
    dtype = _loaded_dtype(folder, next(iter(part.source)), policy)
    leaves = {name: torch.empty(spec.shape, dtype=dtype, device=device) for name, spec in part.target.items()}
    views = views_of(part.inverse, leaves)
    if views is None:
        given = {name: reader.read(folder.store.header(name), name).to(dtype) for name in part.source}
        return {name: tensor.to(device) for name, tensor in part.apply(given).items()}
    for name, view in views.items():
        reader.read_into(folder.store.header(name), name, view)
    return leaves


def _loaded_dtype(folder: HFFolder, name: str, policy: DtypePolicy) -> torch.dtype:
    return converted(folder.store.entry(name).spec.dtype or torch.float32, policy)


def _place(folder: HFFolder, part: Part) -> tuple[str, int]:
    """Where a part begins, so that files are read from front to back."""
    return min((folder.store.places[name], folder.store.entry(name).start) for name in part.source)


def _quiet(done: int, total: int, done_bytes: int, total_bytes: int) -> None:
    del done, total, done_bytes, total_bytes
