"""Frozen parts of a pipeline, read by the libraries that wrote them, from disk alone.

These libraries go on where something is missing: a tensor that no file holds is drawn at random, and a tokenizer without
files knows no words. So a part is tried before a run begins: it is loaded as it will be, but onto the device "meta", which
reads no weights, and whatever its files lack is refused.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from areno_fn.contracts.components import Located
from areno_fn.contracts.errors import CheckpointError, ModelError

_DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""What these libraries raise of files that they cannot make sense of."""


def load_part(part: Located, root: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A part, ready to be asked: a model is in eval mode, on the device, and nothing of it is trained.

    Args:
        part: which, and what reads it.
        root: the folder of the pipeline, in which its own lies.
        dtype: of the weights of a model; None: the file's own.
        device: where a model lies.

    Raises:
        ModelError: the library that reads it is missing, or has no such class.
        CheckpointError: it cannot be read, or its files lack something.
    """
    given: dict[str, Any] = {}
    if part.kind == "model" and part.library == "transformers":
        given = {"dtype": dtype or "auto"}
    elif part.kind == "model" and dtype is not None:
        given = {"torch_dtype": dtype}
    found = _read(part, root, given)
    return found.to(device).eval().requires_grad_(False) if part.kind == "model" else found


def try_part(part: Located, root: str) -> None:
    """Refuses a part that could not be loaded; none of its weights is read.

    Raises:
        ModelError, CheckpointError: as for `load_part`.
    """
    _read(part, root, {"device_map": {"": "meta"}} if part.kind == "model" else {})


def _read(part: Located, root: str, given: dict[str, Any]) -> Any:
    kind, folder = _class(part), os.path.join(root, part.folder)
    if part.kind == "tokenizer":
        _require_words(kind, part, folder)
    if part.kind == "model" and not os.path.isfile(os.path.join(folder, "config.json")):
        raise CheckpointError(f"{folder}: the {part.name} has no config.json, without which its sizes are not known")
    told: dict[str, Any] = {}
    if part.kind == "model":
        told = {"output_loading_info": True}
        told |= {"ignore_mismatched_sizes": True} if part.library == "transformers" else {}  # it then says which
    try:
        with _quiet():
            found = kind.from_pretrained(folder, local_files_only=True, **given, **told)
    except _DAMAGED as error:
        raise CheckpointError(f"{folder}: {part.library} cannot read the {part.name} ({_reason(error)})") from error
    if not told:
        return found
    model, info = found
    _require_whole(part, folder, info)
    return model


def _require_whole(part: Located, folder: str, info: dict[str, Any]) -> None:
    missing, other = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder}: no file holds {missing[0]!r}{more} of the {part.name}, which {part.class_name} has; write it anew"
        )
    if other:
        name, found, wanted = other[0]
        raise CheckpointError(
            f"{folder}: {name!r} of the {part.name} is {list(found)}, but its config.json means {list(wanted)}; write both "
            f"anew"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """What is amiss is refused in a sentence; neither library tells it as well."""
    read = [transformers, *([sys.modules["diffusers"]] if "diffusers" in sys.modules else [])]
    loggers = [library.utils.logging for library in read]
    before = [logger.get_verbosity() for logger in loggers]
    transformers.utils.logging.disable_progress_bar()
    for logger in loggers:
        logger.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, verbosity in zip(loggers, before, strict=True):
            logger.set_verbosity(verbosity)


def _require_words(kind: Any, part: Located, folder: str) -> None:
    """A tokenizer is one file, or those that it is made of."""
    files: dict[str, str] = dict(getattr(kind, "vocab_files_names", {}))
    whole = files.pop("tokenizer_file", "tokenizer.json")
    absent = [file for file in files.values() if not os.path.isfile(os.path.join(folder, file))]
    if not os.path.isfile(os.path.join(folder, whole)) and (absent or not files):
        needed = " and ".join(files.values())
        raise CheckpointError(
            f"{folder}: the {part.name} has no words, for there is no {whole}{f', nor {needed}' if needed else ''}"
        )


def _reason(error: BaseException) -> str:
    """The first sentence."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said.split(". ")[0][:300]


def _class(part: Located) -> Any:
    own = part.library in ("diffusers", "transformers")
    needed = part.library if own else "diffusers"
    try:
        importlib.import_module(needed)
        if part.kind == "model":
            importlib.import_module("accelerate")  # with it, both libraries say which tensors are missing
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the {part.name} is read by {error.name or needed}, which is not installed; pip install 'areno-fn[flow]'"
        ) from error
    try:
        library = importlib.import_module(part.library if own else f"diffusers.pipelines.{part.library}")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the {part.name} is read by {part.library!r}, which is neither transformers nor diffusers, nor one of its pipelines"
        ) from error
    found = getattr(library, part.class_name, None)
    if not isinstance(found, type) or not callable(getattr(found, "from_pretrained", None)):
        raise ModelError(f"this version of {part.library} has no {part.class_name}, which reads the {part.name}")
    return found
