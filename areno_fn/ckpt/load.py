"""Reading a parameter tree out of a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any

import torch

from areno_fn import tree
from areno_fn.ckpt.dtypes import DtypePolicy
from areno_fn.ckpt.fit import loaded_dtype, require_fit
from areno_fn.ckpt.folder import HFFolder
from areno_fn.ckpt.host import passing
from areno_fn.ckpt.ring import Ring
from areno_fn.ckpt.stream import Wanted, stream
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, ParamLayout, Part, views_of

__all__ = ["Progress", "load", "require_fit"]

Progress = Callable[[int, int, int, int], None]
"""Called as `progress(done_tensors, total_tensors, done_bytes, total_bytes)`, of the tensors that the layout claims."""


def load(
    folder: HFFolder,
    iso: Iso,
    *,
    like: Any = None,
    dtype: DtypePolicy = "source",
    device: torch.device | str = "cpu",
    left_out: Collection[str] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Any:
    """Reads a parameter tree.

    Bytes go from the file straight into the leaves, on CUDA through a few pinned buffers. Only a leaf that is not
    made of views, such as one that is tied to two names, needs its tensors beside it while it is made.

    Args:
        folder: what `open_folder` returned.
        iso: from the tensors in the file to the leaves of the tree.
        like: a tree of the wanted structure, whose leaves may be meta tensors; their shapes are compared,
            their dtypes are not.
        dtype: what floating tensors become.
        device: where the leaves will be.
        left_out: patterns of tensors, such as `model.visual.*`, that the file may hold and the layout does not take.
        threads: how many read at a time; by default 4, and on the CPU, where they also make the memory of the leaves,
            as many as there are processors, from 4 to 16.
        progress: told after every leaf; the last call has done everything.

    Returns:
        A tree like `like`, or a dict from paths to tensors without one.

    Raises:
        CheckpointError: as for `require_fit`, or a file changed under the reader.
        LayoutError: `like` is not what the layout gives, or tied tensors differ.
    """
    threads = default_threads(torch.device(device)) if threads is None else threads
    if threads < 1:
        raise CheckpointError(f"threads must be at least 1, received {threads}")
    require_fit(folder, iso, dtype, left_out=left_out)
    paths = None if like is None else dict(tree.leaves_with_path(like))
    if paths is not None:
        ParamLayout(iso.target).check(paths, "the leaves of the model")
    leaves = _load_leaves(folder, iso, dtype, torch.device(device), threads, progress or _quiet)
    return leaves if paths is None else tree.unflatten(like, [leaves[path] for path in paths])


def _load_leaves(
    folder: HFFolder, iso: Iso, policy: DtypePolicy, device: torch.device, threads: int, progress: Progress
) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    views: dict[str, torch.Tensor] = {}
    others: list[Part] = []
    for part in iso.parts:
        dtype = _dtype(folder, part, policy)
        leaves = {name: torch.empty(spec.shape, dtype=dtype, device=device) for name, spec in part.target.items()}
        parts_of_leaves = views_of(part.inverse, leaves)
        if parts_of_leaves is None:
            others.append(part)
        else:
            views |= parts_of_leaves
            made |= leaves
    tally = _tally(folder, iso, progress)
    ring = Ring(device, 2 * threads)
    _fill(folder, ring, threads, views, tally)
    for part in others:
        dtype = _dtype(folder, part, policy)
        given = {name: passing(spec.shape, dtype, device) for name, spec in part.source.items()}
        _fill(folder, ring, threads, given, tally)
        made |= part.apply(given)
    return {name: made[name] for name in iso.target}


def default_threads(device: torch.device) -> int:
    """How many threads read at a time where nothing is said."""
    return 4 if device.type != "cpu" else min(max(os.cpu_count() or 4, 4), 16)


def _tally(folder: HFFolder, iso: Iso, progress: Progress) -> Callable[[str], None]:
    """To be called with every tensor that has been read; tells `progress` when those of a leaf are all there."""
    part_of = {name: number for number, part in enumerate(iso.parts) for name in part.source}
    left = [len(part.source) for part in iso.parts]
    sizes = [sum(folder.store.entry(name).nbytes for name in part.source) for part in iso.parts]
    done = [0, len(iso.source), 0, sum(sizes)]
    progress(*done)

    def add(name: str) -> None:
        part = part_of[name]
        left[part] -= 1
        if not left[part]:
            done[0] += len(iso.parts[part].source)
            done[2] += sizes[part]
            progress(*done)

    return add


def _fill(
    folder: HFFolder, ring: Ring, threads: int, outs: Mapping[str, torch.Tensor], tally: Callable[[str], None]
) -> None:
    """Fills tensors from the file, in the order in which they stand there."""
    wanted = [Wanted(folder.store.header(name), name, out) for name, out in outs.items()]
    wanted.sort(key=lambda item: (str(item.header.path), item.header.entries[item.name].start))
    with closing(stream(wanted, ring, threads)) as names:
        for name in names:
            tally(name)


def _dtype(folder: HFFolder, part: Part, policy: DtypePolicy) -> torch.dtype:
    return loaded_dtype(folder.specs[next(iter(part.source))], policy)


def _quiet(done: int, total: int, done_bytes: int, total_bytes: int) -> None:
    del done, total, done_bytes, total_bytes
