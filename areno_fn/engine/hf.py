"""`load_hf` and `save_hf`: a Hugging Face folder as a model and its parameters, for programs of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areno_fn.ckpt import hf
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import HFModel
from areno_fn.engine.model import ModelPlan, from_folder


def load_hf(
    path: str | Path,
    *,
    dtype: hf.DtypePolicy = "source",
    device: torch.device | str = "cpu",
    progress: hf.Progress | None = None,
) -> tuple[ModelPlan, Any]:
    """Reads a folder.

        model, params = load_hf("SmolLM2-135M-Instruct")
        hidden = model.policy.hidden(params, tokens, positions, segments)

    Args:
        path: a folder with config.json and safetensors files.
        dtype: what floating parameters become; "source" keeps each file's own.
        device: where the parameters will be.
        progress: told after every tensor.

    Returns:
        The model, whose `policy` holds its functions, and the parameter tree.

    Raises:
        ModelError: the configuration has a field that is not supported.
        CheckpointError: the folder is damaged or incomplete.
    """
    model = from_folder(HFModel(path=str(path), dtype=dtype))
    return model, model.load(Key.of(0), torch.device(device), progress)


def save_hf(out: str | Path, params: Any, model: ModelPlan, *, dtype: hf.DtypePolicy = "source") -> Path:
    """Writes a folder that transformers reads, with everything that the source folder had beside its weights.

    Args:
        out: the folder; it appears whole, or what was there stays. Of several transformers each has a folder in it.
        params: a parameter tree of the model.
        model: what `load_hf` returned.
        dtype: "source" writes every tensor in the dtype that the source folder has.

    Returns:
        The folder.

    Raises:
        CheckpointError: the folder cannot be written, or holds something else.
    """
    if not model.weights:
        return hf.save(out, params, model.layout, model.hf_config, dtype=dtype)
    for part in model.weights:
        where = Path(out) / part.prefix.removesuffix(".")
        hf.save(
            where, part.own(params), part.layout, part.config, source=part.folder, dtype=dtype, left_out=part.left_out
        )
    return Path(out)
