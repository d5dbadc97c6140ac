"""The weight files of a model: one folder, or those of the several transformers that a pipeline has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch

from areno_fn import tree
from areno_fn.ckpt import hf
from areno_fn.contracts.layout import Iso

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Weights:
    """One folder of weights.

    Attributes:
        folder: where they are.
        layout: from the tensors of the folder to leaves, by the names that these have in it.
        config: the content of config.json, as it will be written.
        name: the component of a pipeline that it is; empty of any other model.
        prefix: what the names of its leaves begin with in the model; empty where it is the only one.
        trained: whether it is trained, or stays as it is.
        left_out: patterns of tensors that it may hold, and that nothing reads.
    """

    folder: hf.HFFolder
    layout: Iso
    config: Mapping[str, Any]
    name: str = ""
    prefix: str = ""
    trained: bool = True
    left_out: tuple[str, ...] = ()

    def own(self, params: T) -> T:
        """The part of a parameter tree that lies here; the whole tree, where this is the only folder."""
        if not self.prefix:
            return params
        return own_part(params, self.prefix)  # type: ignore[arg-type, return-value]  # several folders make a flat tree

    def require_fit(self, dtype: hf.DtypePolicy) -> None:
        """Compares headers with the layout.

        Raises:
            CheckpointError: the folder holds other tensors.
        """
        hf.require_fit(self.folder, self.layout, dtype, left_out=self.left_out)

    def as_loaded(self, shapes: T, dtype: hf.DtypePolicy) -> T:
        """Its meta tensors in the dtypes that leaves get when they are read."""
        return as_loaded(shapes, self.folder, self.layout, dtype)

    def load(self, like: T, dtype: hf.DtypePolicy, device: torch.device, progress: hf.Progress | None) -> T:
        """Its leaves, read from the files."""
        found: T = hf.load(
            self.folder,
            self.layout,
            like=like,
            dtype=dtype,
            device=device,
            left_out=self.left_out,
            progress=progress,
        )
        return found


def own_part(params: Mapping[str, T], prefix: str) -> dict[str, T]:
    """What of a flat tree has names that begin with a prefix, without it."""
    return {name.removeprefix(prefix): leaf for name, leaf in params.items() if name.startswith(prefix)}


def as_loaded(shapes: T, folder: hf.HFFolder, layout: Iso, policy: hf.DtypePolicy) -> T:
    """Meta tensors in the dtypes that leaves get when they are read from a folder.

    Args:
        layout: from the tensors of the folder to the leaves.
        policy: what floating tensors become.
    """

    def leaf(path: str, meta: torch.Tensor) -> torch.Tensor:
        stored = folder.specs[layout.sources_of(path)[0]].dtype or torch.float32
        return meta.to(hf.converted(stored, policy))

    found: T = tree.map_with_path(leaf, shapes)
    return found


def all_as_loaded(weights: Sequence[Weights], shapes: Any, dtype: hf.DtypePolicy) -> Any:
    """`as_loaded` of a model whose parameters lie in several folders, or in one."""
    if len(weights) == 1:
        return weights[0].as_loaded(shapes, dtype)
    made = ((part, part.as_loaded(part.own(shapes), dtype)) for part in weights)
    return {part.prefix + name: leaf for part, leaves in made for name, leaf in leaves.items()}


def load_all(
    weights: Sequence[Weights],
    like: Any,
    dtype: hf.DtypePolicy,
    device: torch.device,
    progress: hf.Progress | None = None,
) -> Any:
    """Reads all folders of a model.

    Args:
        like: the parameter tree as meta tensors.
        progress: told of the tensors of all.
    """
    if len(weights) == 1:
        return weights[0].load(like, dtype, device, progress)
    found: dict[str, torch.Tensor] = {}
    counts = [_count(part) for part in weights]
    for place, part in enumerate(weights):
        told = None if progress is None else _beside(progress, counts, place)
        leaves = part.load(part.own(like), dtype, device, told)
        found |= {part.prefix + name: leaf for name, leaf in leaves.items()}
    return found


def _count(part: Weights) -> tuple[int, int]:
    """Tensors and bytes that are read."""
    return len(part.layout.source), sum(part.folder.store.entry(name).nbytes for name in part.layout.source)


def _beside(progress: hf.Progress, counts: Sequence[tuple[int, int]], place: int) -> hf.Progress:
    """What is told of one folder, as told of all."""
    (before, bytes_before), (all_, all_bytes) = (
        (sum(count for count, _ in some), sum(size for _, size in some)) for some in (counts[:place], counts)
    )

    def told(done: int, _total: int, done_bytes: int, _total_bytes: int) -> None:
        progress(before + done, all_, bytes_before + done_bytes, all_bytes)

    return told
