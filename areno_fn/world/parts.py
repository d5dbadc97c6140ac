"""Frozen parts of a pipeline, read by the libraries that wrote them, from disk alone."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import transformers

from areno_fn.contracts.components import Located
from areno_fn.contracts.errors import CheckpointError, ModelError


def load_part(part: Located, root: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A part, ready to be asked: a model is in eval mode, on the device, and nothing of it is trained.

    Args:
        part: which, and what reads it.
        root: the folder of the pipeline, in which its own lies.
        dtype: of the weights of a model; None: the file's own.
        device: where a model lies.

    Raises:
        ModelError: the library that reads it is missing, or has no such class.
        CheckpointError: it cannot be read.
    """
    kind, folder = _class(part), os.path.join(root, part.folder)
    transformers.utils.logging.disable_progress_bar()
    given: dict[str, Any] = {}
    if part.kind == "model" and part.library == "transformers":
        given = {"dtype": dtype or "auto"}
    elif part.kind == "model" and dtype is not None:
        given = {"torch_dtype": dtype}
    try:
        found = kind.from_pretrained(folder, local_files_only=True, **given)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{folder}: {part.library} cannot read the {part.name} ({reason})") from error
    return found.to(device).eval().requires_grad_(False) if part.kind == "model" else found


def _class(part: Located) -> Any:
    own = part.library in ("diffusers", "transformers")
    needed = part.library if own else "diffusers"
    try:
        importlib.import_module(needed)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the {part.name} is read by {needed}, which is not installed; pip install 'areno-fn[flow]'"
        ) from error
    try:
        library = importlib.import_module(part.library if own else f"diffusers.pipelines.{part.library}")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the {part.name} is read by {part.library!r}, which is neither transformers nor diffusers, nor one of its pipelines"
        ) from error
    found = getattr(library, part.class_name, None)
    if found is None:
        raise ModelError(f"this version of {part.library} has no {part.class_name}, which reads the {part.name}")
    return found
