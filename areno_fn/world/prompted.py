"""Rows for models that make pictures, videos and sound of prompts: what is asked for, and what is shown or preferred.

    {"prompt": "a heron", "negative_prompt": "a crane"}                                   to draw for
    {"prompt": "a heron", "image": "heron.png"}                                           a demonstration
    {"prompt": "a heron", "chosen": "heron.png", "rejected": "crane.png"}                 a preference
    {"prompt": "it flies", "inputs": [{"image": "heron.png", "slot": "first_frame"}], ...}   with given media

A picture is the path of a file, from the folder of the row's file, or numbers [3, H, W] from 0 to 1. A video is a list of
paths, one a frame, or numbers [T, 3, H, W]; sound is numbers [C, L] from -1 to 1. Of a model that makes several, what is
chosen and rejected is {"video": ..., "audio": ...}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.media import MEDIA_TYPES, Media, MediaType, Request
from areno_fn.world import picture_files
from areno_fn.world.data_row import Row

_NUMBERS: dict[MediaType, str] = {"image": "[3, H, W]", "video": "[T, 3, H, W]", "audio": "[C, L]"}


@attrs.frozen(eq=False)
class Shot:
    """A medium of a row, which is read when it is needed.

    Attributes:
        type: which.
        where: the row.
        value: the paths of its frames, or its numbers.
        shape: of its numbers.
        digest: of its bytes.
    """

    type: MediaType
    where: str
    value: tuple[Path, ...] | torch.Tensor
    shape: tuple[int, ...]
    digest: bytes

    def read(self) -> torch.Tensor:
        """Its numbers, float32.

        Raises:
            DataError: a file can no longer be read, or has become another size.
        """
        if isinstance(self.value, torch.Tensor):
            return self.value
        frames = [picture_files.pixels(path, self.where) for path in self.value]
        for path, frame in zip(self.value, frames, strict=True):
            if frame.shape[-2:] != self.shape[-2:]:
                size, before = (" x ".join(map(str, shape[-2:])) for shape in (frame.shape, self.shape))
                raise DataError(
                    f"{self.where}: the picture {picture_files.shown(path)} is {size}, but was {before} as the run began"
                )
        return frames[0] if self.type == "image" else torch.stack(frames)


Shots = Mapping[MediaType, Shot]


@attrs.frozen(eq=False)
class PromptedRow:
    """A row to train on.

    Attributes:
        request: what is asked for.
        shown: the media that are shown; or those that are preferred, and the others.
        row: index of the row in its data set.
    """

    request: Request
    shown: tuple[Shots, ...]
    row: int

    @property
    def content(self) -> bytes:
        """What it says, in few bytes."""
        digests = [shots[type].digest for shots in self.shown for type in sorted(shots)]
        return self.request.fingerprint.encode() + b"".join(digests)


def request_of(row: Row) -> Request:
    """What a row asks for.

    Raises:
        DataError: it has no prompt in words, or a given medium cannot be read.
    """
    prompt, negative = row.get("prompt"), row.get("negative_prompt")
    if "prompt" not in row:
        raise DataError(
            f"{row.where}: the row has {_named(row)}, but no 'prompt'; where it is called otherwise, give the data set "
            f'columns = {{ prompt = "its name" }}'
        )
    if not isinstance(prompt, str):
        raise DataError(f"{row.where}: a row needs a prompt in words, received {type(prompt).__name__}")
    if negative is not None and not isinstance(negative, str):
        raise DataError(f"{row.where}: negative_prompt must be words, received {type(negative).__name__}")
    given = [] if row.get("inputs") is None else row["inputs"]
    if not isinstance(given, list):
        raise DataError(f"{row.where}: inputs must be a list, received {type(given).__name__}")
    return Request(prompt=prompt, negative_prompt=negative, media=tuple(_given(row, one) for one in given))


def demonstration(row: Row, place: int, types: tuple[MediaType, ...]) -> PromptedRow:
    """A row that shows what is to be made, under the names of the types.

    Args:
        row: with a prompt, and a medium of every type.
        place: index of the row in its data set.
        types: that the model makes.

    Raises:
        DataError: a medium is missing, or cannot be read.
    """
    return PromptedRow(request_of(row), (_shots(row, row, types, "the row"),), place)


def preference(row: Row, place: int, types: tuple[MediaType, ...]) -> PromptedRow:
    """A row that shows what is `chosen` and what is `rejected`.

    Raises:
        DataError: as for `demonstration`.
    """
    shown = []
    for key in ("chosen", "rejected"):
        value = row.get(key)
        if value is None:
            raise DataError(f"{row.where}: the row has no {key!r}; a preference is a prompt, chosen and rejected")
        shown.append(_shots(row, {types[0]: value} if len(types) == 1 else value, types, key))
    return PromptedRow(request_of(row), tuple(shown), place)


def shot_of(row: Row, value: Any, type: MediaType) -> Shot:
    """A medium of a row.

    Raises:
        DataError: it cannot be read, or is none.
    """
    paths = [value] if isinstance(value, str) else value
    if type != "audio" and isinstance(paths, list) and paths and all(isinstance(path, str) for path in paths):
        return _from_files(row, tuple(Path(row.file).parent / path for path in paths), type)
    numbers = _numbers(value)
    if numbers is None:
        raise DataError(f"{row.where}: {type} must be {_legal(type)}, received {value!r:.60}")
    colours = numbers.ndim == len(_NUMBERS[type].split(",")) and (type == "audio" or numbers.shape[-3] == 3)
    if not colours:
        raise DataError(f"{row.where}: {type} must be {_legal(type)}, received the shape {list(numbers.shape)}")
    try:
        checked = Media(type=type, data=numbers).data
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    return Shot(type, row.where, checked, tuple(numbers.shape), hashlib.sha256(numbers.numpy().tobytes()).digest())


def _numbers(value: Any) -> torch.Tensor | None:
    """Numbers of any depth, float32; None of what numpy would only turn into some, as texts and nothing."""
    try:
        found = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return None
    if found.ndim == 0 or (found.size and found.dtype.kind not in "iuf"):
        return None
    return torch.from_numpy(np.ascontiguousarray(found, np.float32))


def _shots(row: Row, values: Any, types: tuple[MediaType, ...], what: str) -> Shots:
    missing = [type for type in types if not isinstance(values, Mapping) or type not in values]
    if missing:
        there = f"has {_named(values)}" if isinstance(values, Mapping) else f"is {values!r:.60}"
        raise DataError(f"{row.where}: {what} needs {' and '.join(types)}, but {there}")
    return {type: shot_of(row, values[type], type) for type in types}


def _from_files(row: Row, paths: tuple[Path, ...], type: MediaType) -> Shot:
    if type == "image" and len(paths) > 1:
        raise DataError(f"{row.where}: an image is one file, received {len(paths)}")
    sizes, found = set(), hashlib.sha256()
    for path in paths:
        seen = picture_files.look(path, row.where)
        sizes.add(seen.size)
        found.update(seen.content)
    if len(sizes) > 1:
        raise DataError(
            f"{row.where}: the frames of a video have one size, received {' and '.join(map(str, sorted(sizes)))}"
        )
    shape = (3, *sizes.pop())
    return Shot(type, row.where, paths, shape if type == "image" else (len(paths), *shape), found.digest())


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, values))) or "no fields"


def _given(row: Row, value: Any) -> Media:
    if not isinstance(value, Mapping):
        value = {"image": value}
    types: list[MediaType] = [type for type in MEDIA_TYPES if type in value]
    if len(types) != 1 or value.keys() - {types[0], "slot"}:
        keys = ", ".join(sorted(map(str, value)))
        raise DataError(f"{row.where}: one of inputs is {{image, video or audio, and perhaps slot}}, received {keys}")
    shot = shot_of(row, value[types[0]], types[0])
    return Media(type=types[0], data=shot if shot.type == "video" else shot.read(), slot=value.get("slot", ""))


def _legal(type: MediaType) -> str:
    paths = {"image": "a path or ", "video": "a list of paths or ", "audio": ""}[type]
    return f"{paths}numbers {_NUMBERS[type]}"
