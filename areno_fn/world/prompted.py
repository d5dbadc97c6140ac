"""Rows for models that make pictures of prompts: what is asked for, and the pictures that are shown or preferred.

    {"prompt": "a heron", "negative_prompt": "a crane"}                            to draw for
    {"prompt": "a heron", "image": "heron.png"}                                    a demonstration
    {"prompt": "a heron", "chosen": "heron.png", "rejected": "crane.png"}          a preference
    {"prompt": "make it fly", "inputs": [{"image": "heron.png", "slot": ""}]}      with a given picture

A picture is the path of a file, from the folder of the row's file, or an array [C, H, W] from 0 to 1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.media import Media, Request
from areno_fn.world.data_row import Row

_KEYS = ("image", "chosen", "rejected")


@attrs.frozen(eq=False)
class Shot:
    """A picture of a row, which is read when it is needed.

    Attributes:
        where: the row.
        value: the path of its file, or the array itself.
        size: height and width.
        digest: of its bytes.
    """

    where: str
    value: Path | torch.Tensor
    size: tuple[int, int]
    digest: bytes

    def read(self) -> torch.Tensor:
        """The picture, float32 [3, H, W] from 0 to 1.

        Raises:
            DataError: its file can no longer be read.
        """
        if isinstance(self.value, torch.Tensor):
            return self.value
        with _opened(self.value, self.where) as image:
            pixels = np.asarray(image.convert("RGB"), np.float32)
        return torch.from_numpy(pixels / 255).permute(2, 0, 1).contiguous()


@attrs.frozen(eq=False)
class PromptedRow:
    """A row to train on.

    Attributes:
        request: what is asked for.
        shots: the picture that is shown; or the one that is preferred, and the other.
        row: index of the row in its data set.
    """

    request: Request
    shots: tuple[Shot, ...]
    row: int

    @property
    def content(self) -> bytes:
        """What it says, in few bytes."""
        return self.request.fingerprint.encode() + b"".join(shot.digest for shot in self.shots)


def request_of(row: Row) -> Request:
    """What a row asks for.

    Raises:
        DataError: it has no prompt in words, or a given picture cannot be read.
    """
    prompt, negative = row.get("prompt"), row.get("negative_prompt")
    if not isinstance(prompt, str):
        raise DataError(f"{row.where}: a row needs a prompt in words, received {type(prompt).__name__}")
    if negative is not None and not isinstance(negative, str):
        raise DataError(f"{row.where}: negative_prompt must be words, received {type(negative).__name__}")
    given = row.get("inputs") or []
    if not isinstance(given, list):
        raise DataError(f"{row.where}: inputs must be a list, received {type(given).__name__}")
    return Request(prompt=prompt, negative_prompt=negative, media=tuple(_medium(row, one) for one in given))


def example_of(row: Row, place: int, keys: tuple[str, ...]) -> PromptedRow:
    """A row to train on, its pictures looked at but not kept.

    Args:
        row: with a prompt, and a picture under each key.
        place: index of the row in its data set.
        keys: "image", or "chosen" and "rejected".

    Raises:
        DataError: a picture is missing, or cannot be read.
    """
    missing = [key for key in keys if key not in row]
    if missing:
        there = [key for key in _KEYS if key in row]
        found = f"; it has {' and '.join(there)}" if there else ""
        raise DataError(
            f"{row.where}: the row needs {' and '.join(keys)} beside its prompt, and has no {missing[0]}{found}"
        )
    return PromptedRow(request_of(row), tuple(shot_of(row, row[key], key) for key in keys), place)


def shot_of(row: Row, value: Any, key: str) -> Shot:
    """A picture under a key of a row.

    Raises:
        DataError: it cannot be read, or is no picture.
    """
    if isinstance(value, str):
        path = Path(row.file).parent / value
        with _opened(path, row.where) as image:
            width, height = image.size
        return Shot(row.where, path, (height, width), hashlib.sha256(path.read_bytes()).digest())
    try:
        array = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{row.where}: {key} must be a path or numbers [3, H, W], received {type(value).__name__}"
        ) from error
    if array.ndim != 3 or array.shape[0] != 3:
        raise DataError(f"{row.where}: {key} must be numbers [3, H, W], received the shape {list(array.shape)}")
    picture = Media(type="image", data=array).data
    return Shot(
        row.where, picture, (int(array.shape[1]), int(array.shape[2])), hashlib.sha256(array.numpy().tobytes()).digest()
    )


def _medium(row: Row, value: Any) -> Media:
    slot = ""
    if isinstance(value, dict):
        strange = value.keys() - {"image", "slot"}
        if strange or "image" not in value:
            raise DataError(f"{row.where}: an input is {{image, slot}}, received {', '.join(sorted(map(str, value)))}")
        slot, value = value.get("slot", ""), value["image"]
    return Media(type="image", data=shot_of(row, value, "inputs").read(), slot=slot)


def _opened(path: Path, where: str) -> Image.Image:
    try:
        return Image.open(path)
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(
            f"{where}: the picture {path} cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error
