"""Which files of a folder are the split that was asked for: what `datasets` saved, or Parquet and JSONL files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from areno_fn.contracts.errors import DataError

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SUFFIXES = (".parquet", ".jsonl")
_USUAL = "train"
_WORDS: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""Words in the names of files and folders, and the splits that `datasets` takes them for."""

_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")


def files_of(folder: str, split: str) -> list[Path]:
    """The files of one split, in the order of their rows.

    Args:
        folder: written by `save_to_disk`, of a data set or a dictionary of them; or with Parquet or JSONL files, whose
            split is a word of their name or of a folder's. Files without such a word are train.
        split: when empty, the only one there is, or train.

    Raises:
        DataError: there is no such folder, split or file.
    """
    root = Path(folder)
    try:
        if (root / _STATE).is_file():
            return _saved(root, split)
        if (root / _SPLITS).is_file():
            return _saved(root / _one(_listed(root / _SPLITS, "splits"), split, folder), "")
        found = sorted(file for file in root.rglob("*") if file.suffix in _SUFFIXES and _seen(file.relative_to(root)))
    except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"the data folder {folder} cannot be read ({reason}); give the path of a folder") from None
    if not found:
        raise DataError(
            f"the data folder {folder} {'has no Parquet or JSONL file in it' if root.is_dir() else 'does not exist'}; "
            f"give a folder that `datasets` saved, or one of such files"
        )
    by_split: dict[str, list[Path]] = {}
    for file in found:
        by_split.setdefault(_split_of(file.relative_to(root)), []).append(file)
    files = by_split[_one(list(by_split), split, folder)]
    if len({file.suffix for file in files}) > 1:
        raise DataError(
            f"the data folder {folder} has Parquet and JSONL files side by side; they may be the same rows twice"
        )
    return files


def _saved(folder: Path, split: str) -> list[Path]:
    own = _object(folder / _STATE).get("_split")
    if split and split != own:
        raise DataError(
            f"the data folder {folder} holds the split {own!r}, not {split!r}; leave `split` empty to read it"
        )
    entries = _listed(folder / _STATE, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".arrow"):
            raise DataError(f"{folder / _STATE}: a data file must be an .arrow file of that folder, received {name!r}")
    if _object(folder / _STATE).get("_indices_files"):
        raise DataError(
            f"the data folder {folder} was saved with indices beside its rows; save it after flatten_indices()"
        )
    return [folder / str(name) for name in names]


def _one(splits: list[Any], split: str, folder: str) -> str:
    """The split asked for, among those there are."""
    names = sorted(str(name) for name in splits)
    chosen = split or (names[0] if len(names) == 1 else _USUAL)
    if chosen not in names or Path(chosen).name != chosen:
        raise DataError(
            f"the data folder {folder} has no split {chosen!r}; its splits are {', '.join(names) or 'none'}"
        )
    return chosen


def _split_of(file: Path) -> str:
    """What the name of a file says, or else the nearest of its folders; a numbered part carries the split's own name."""
    shard = _SHARD.fullmatch(file.stem)
    if shard:
        return shard["split"]
    for part in (file.stem, *reversed(file.parts[:-1])):
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in _WORDS:
                return _WORDS[word]
    return _USUAL


def _seen(file: Path) -> bool:
    return not any(part.startswith(".") for part in file.parts)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); save the data set again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold a JSON object, received {type(value).__name__}; save the data set again")
    return value


def _listed(path: Path, key: str) -> list[Any]:
    value = _object(path).get(key)
    if not isinstance(value, list):
        raise DataError(f"{path}: {key!r} must be a list, received {type(value).__name__}; save the data set again")
    return value
