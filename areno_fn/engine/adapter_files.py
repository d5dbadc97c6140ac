"""Adapters between a PEFT folder and their tree: the names, the configuration, and what of it can be trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from areno_fn import tree
from areno_fn.ckpt.peft import AdapterConfig, key_of, open_adapter, read_adapter, write_adapter
from areno_fn.contracts.adapter import LowRank
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, TensorSpec, product, rename
from areno_fn.models.adapter_sites import Site
from areno_fn.models.adapters import Adapters, shapes


def adapter_layout(adapters: Mapping[str, LowRank]) -> Iso:
    """From the keys of a PEFT file to the leaves of a tree of adapters.

    Args:
        adapters: may be meta tensors; their dtypes are left open.
    """
    sides = [
        (key_of(module, side), f"{module}.{side.lower()}", matrix)
        for module, part in adapters.items()
        for side, matrix in (("A", part.a), ("B", part.b))
    ]
    return product(rename(key, leaf, TensorSpec(tuple(matrix.shape))) for key, leaf, matrix in sides)


def plan_adapter(folder: str, sites: Mapping[str, Site]) -> tuple[AdapterConfig, tuple[Site, ...]]:
    """The configuration of a PEFT folder and the sites of its modules; no matrix is read.

    Args:
        folder: what PEFT or `save_adapter` wrote.
        sites: every linear map of the model by its module.

    Raises:
        CheckpointError: it is damaged, of another model, or of a sort that is not trained here.
    """
    opened = open_adapter(folder)
    config = opened.config
    strange = [module for module in opened.modules if module not in sites]
    if strange:
        raise CheckpointError(
            f"{folder}: it adapts {strange[0]!r} ({len(strange)} such modules), which is no linear map of this model that can be "
            f"adapted"
        )
    if config.fan_in_fan_out:
        raise CheckpointError(
            f"{folder}: fan_in_fan_out is true, but the weights of this model are stored as [out, in]"
        )
    if config.lora_dropout:
        raise CheckpointError(
            f"{folder}: lora_dropout is {config.lora_dropout}, but adapters are trained without dropout here, so that a rollout "
            f"and its training agree; set it to 0.0 in adapter_config.json"
        )
    chosen = tuple(site for module, site in sites.items() if module in opened.modules)
    _require_shapes(folder, {name: entry.spec for name, entry in opened.header.entries.items()}, chosen, config)
    return config, chosen


def load_adapter(folder: str, like: Adapters, device: torch.device) -> Adapters:
    """Reads the matrices of a PEFT folder, in the dtype of `like`, in which they are trained.

    Args:
        folder: one that `plan_adapter` accepted.
        like: the adapters it holds, as meta tensors.
        device: where they will be.

    Raises:
        CheckpointError: the folder is damaged.
        LayoutError: it has changed since it was planned.
    """
    leaves = adapter_layout(like)(read_adapter(folder).tensors)
    return tree.map_with_path(lambda path, meta: leaves[path].to(device=device, dtype=meta.dtype), like)


def save_adapter(folder: Path, config: AdapterConfig, adapters: Adapters, part: str | None = None) -> Path:
    """Writes adapters as a PEFT folder, which diffusers loads too where `part`, of a pipeline, is named.

    Raises:
        CheckpointError: the folder holds something else, or the disk refuses.
    """
    tensors = adapter_layout(adapters).inverse(dict(tree.leaves_with_path(adapters)))
    return write_adapter(folder, config, tensors, part)


def adapter_folder(folder: str | Path, prefix: str) -> str:
    """Where the adapters lie of modules whose names begin with `prefix`, such as "transformer_2."; empty of all."""
    return str(Path(folder) / prefix.removesuffix(".")) if prefix else str(folder)


def _require_shapes(
    folder: str, stored: Mapping[str, TensorSpec], sites: tuple[Site, ...], config: AdapterConfig
) -> None:
    wanted = adapter_layout(shapes(sites, config.rank, config.scale)).source
    wrong = [
        f"{name!r} is {stored[name]}, but the model needs {spec}"
        for name, spec in wanted.items()
        if stored[name].shape != spec.shape
    ]
    if wrong:
        raise CheckpointError(f"{folder} is an adapter of another model: {'; '.join(wrong)}")
