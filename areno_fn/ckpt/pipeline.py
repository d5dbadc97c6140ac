"""A pipeline folder of diffusers, opened: which parts it has, and the configuration of each. No weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.paths import member, read_small
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.flow_adapter import Pipeline

INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json")
_LONGEST = 10_000_000


def is_pipeline(path: str | Path) -> bool:
    """Whether a folder is that of a pipeline."""
    return "\0" not in str(path) and os.path.lexists(Path(path) / INDEX)


def open_pipeline(path: str | Path, elsewhere: Mapping[str, str] | None = None) -> Pipeline:
    """Reads what a pipeline folder says of itself.

    Args:
        path: the folder.
        elsewhere: folders of parts that lie in another place, by name.

    Raises:
        CheckpointError: a file is missing or damaged, or a part is of another library than diffusers and transformers.
    """
    folder = Path(path)
    said = _object(member(folder, INDEX))
    class_name = said.pop("_class_name", None)
    if not isinstance(class_name, str):
        raise CheckpointError(f"{folder / INDEX}: _class_name is {class_name!r}, it must be that of a pipeline")
    index: dict[str, tuple[str, str] | None] = {}
    options: dict[str, Any] = {}
    for name, value in said.items():
        if name.startswith("_") or not isinstance(value, list):
            options[name] = value
        else:
            index[name] = _entry(folder, name, value)
    there = [name for name, entry in index.items() if entry is not None]
    return Pipeline(
        class_name=class_name,
        index=index,
        options=options,
        configs={name: _config(folder, name, (elsewhere or {}).get(name)) for name in there},
    )


def _entry(folder: Path, name: str, value: list[Any]) -> tuple[str, str] | None:
    if value == [None, None]:
        return None
    if len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise CheckpointError(f"{folder / INDEX}: {name} is {value!r}, it must be a library and a class, or two nulls")
    library, class_name = value
    if not library.isidentifier():
        raise CheckpointError(
            f"{folder / INDEX}: {name} is a {class_name} of {library!r}, but parts are read by transformers, diffusers, or one of "
            f"its pipelines, by the plain name of that"
        )
    return library, class_name


def _config(folder: Path, name: str, elsewhere: str | None) -> dict[str, Any]:
    """What a part says of itself; nothing for tokenizers and processors, which read their files themselves."""
    root, within = (folder, f"{name}/") if elsewhere is None else (Path(elsewhere), "")
    for file in _CONFIGS:
        if os.path.lexists(root / within / file):
            return _object(member(root, within + file))
    if not (root / within).is_dir():
        where = f"{folder} has no folder {name!r}, which {INDEX} names"
        raise CheckpointError(where if elsewhere is None else f"{elsewhere} is no folder that could be the {name}")
    return {}


def _object(path: Path) -> dict[str, Any]:
    values = strict_json(read_small(path, _LONGEST), str(path))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, it must be an object")
    return values
