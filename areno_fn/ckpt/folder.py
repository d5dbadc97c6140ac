"""A Hugging Face folder, opened with every check that needs no weight."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from areno_fn.ckpt import atomic
from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.paths import member, read_small
from areno_fn.ckpt.store import Store, open_store
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec

CONFIG = "config.json"
GENERATION = "generation_config.json"
_LONGEST_CONFIG = 10_000_000


@attrs.frozen
class HFFolder:
    """A folder whose configuration and headers have been read and checked.

    Attributes:
        path: the folder.
        config: the contents of config.json.
        generation: the contents of generation_config.json; empty when there is none.
        store: where its tensors are.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    store: Store

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every tensor in its files."""
        return self.store.specs

    def __contains__(self, name: object) -> bool:
        return name in self.store.places


def open_folder(path: str | Path) -> HFFolder:
    """Opens a folder: configuration, index and headers, but no byte of a tensor.

    Raises:
        CheckpointError: the folder, its configuration or its weights are missing, or something is damaged.
    """
    if "\0" in str(path):
        raise CheckpointError(
            f"{str(path)!r} holds a NUL character, which no path can; a Hugging Face folder is needed"
        )
    folder = Path(path)
    try:
        _require_folder(folder)
        config = _json_object(member(folder, CONFIG))
        generation = _json_object(member(folder, GENERATION)) if os.path.lexists(folder / GENERATION) else {}
        return HFFolder(folder, config, generation, open_store(folder))
    except OSError as error:  # a name that is too long, or a folder that must not be entered
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); a Hugging Face folder is needed") from error


def _require_folder(folder: Path) -> None:
    atomic.restore(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is {'not a folder' if folder.exists() else 'not there'}; a Hugging Face folder is needed"
        )
    if not os.path.lexists(folder / CONFIG):
        raise CheckpointError(f"{folder} has no {CONFIG}; a Hugging Face folder is needed")


def _json_object(path: Path) -> dict[str, Any]:
    values = strict_json(read_small(path, _LONGEST_CONFIG), str(path))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, it must be an object")
    return values
