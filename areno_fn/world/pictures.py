"""Pictures outside of a model: arrays float32 [C, S, S] from 0 to 1, read from rows, measured and drawn."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from PIL import Image

from areno_fn.contracts.errors import DataError
from areno_fn.world.data_row import Row

Picture = np.ndarray[Any, np.dtype[np.float32]]

_GAP = 2
_SCALE = 4


@attrs.frozen(eq=False)
class PictureRow:
    """A row of pictures.

    Attributes:
        picture: float32 [C, S, S].
        label: its class.
        row: index of the row in its data set.
    """

    picture: Picture
    label: int
    row: int


@attrs.frozen(eq=False)
class PairRow:
    """A row of pairs of pictures.

    Attributes:
        chosen, rejected: float32 [C, S, S], the one that is preferred and the other.
        label, other: the classes that they are preferred and rejected as.
        row: index of the row in its data set.
    """

    chosen: Picture
    rejected: Picture
    label: int
    other: int
    row: int


def array(picture: Any) -> Picture:
    """A picture [S, S] or [C, S, S] as an array [C, S, S]."""
    found = np.asarray(picture, np.float32)
    return found[None] if found.ndim == 2 else found


def encode(rows: Sequence[Row], shape: tuple[int, ...], classes: int) -> tuple[PictureRow, ...]:
    """The pictures of rows.

    Args:
        rows: with a `picture` and a `label`.
        shape: C, S, S that the model draws.
        classes: that it knows.

    Raises:
        DataError: a picture has another shape, or a label is none of the classes; names the row.
    """
    return tuple(_encoded(row, place, shape, classes) for place, row in enumerate(rows))


def _encoded(row: Row, place: int, shape: tuple[int, ...], classes: int) -> PictureRow:
    return PictureRow(_fitting(row, "picture", shape), _class(row, "label", classes), place)


def encode_pairs(rows: Sequence[Row], shape: tuple[int, ...], classes: int) -> tuple[PairRow, ...]:
    """The pairs of rows.

    Args:
        rows: with `chosen`, `rejected` and a `label`, and a `rejected_label` where the other was made for another class.
        shape: C, S, S that the model draws.
        classes: that it knows.

    Raises:
        DataError: as `encode`.
    """
    return tuple(
        PairRow(
            _fitting(row, "chosen", shape),
            _fitting(row, "rejected", shape),
            _class(row, "label", classes),
            _class(row, "rejected_label" if "rejected_label" in row else "label", classes),
            place,
        )
        for place, row in enumerate(rows)
    )


def _fitting(row: Row, key: str, shape: tuple[int, ...]) -> Picture:
    picture = array(row[key])
    if picture.shape != shape:
        raise DataError(f"{row.where}: the picture is {list(picture.shape)}, but the model draws {list(shape)}")
    return picture


def _class(row: Row, key: str, classes: int) -> int:
    label: int = row[key]
    if not 0 <= label < classes:
        raise DataError(f"{row.where}: label {label} is none of the {classes} classes of the model")
    return label


def still(picture: Picture) -> Picture:
    """A picture [C, H, W] itself, or the frame in the middle of a video [T, C, H, W]."""
    return picture if picture.ndim == 3 else picture[len(picture) // 2]


def subjects(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """What the pictures of rows are of, as numbers: the row's label, or the place where its prompt first stands."""
    if all("label" in row for row in rows):
        return [row["label"] for row in rows]
    first: dict[Any, int] = {}
    return [first.setdefault(row["prompt"], len(first)) for row in rows]


def diversity(labels: Sequence[int], pictures: Sequence[Picture]) -> float | None:
    """How different pictures of one class are: the root mean square difference of two of them, averaged over pairs and classes.

    Classes with one picture say nothing; None where there are no others.
    """
    means = [_spread(np.stack(own)) for own in _by_class(labels, pictures).values() if len(own) > 1]
    return float(np.mean(means)) if means else None


def _spread(pictures: np.ndarray[Any, Any]) -> float:
    flat = pictures.reshape(len(pictures), -1).astype(np.float64)
    distances = np.sqrt(((flat[:, None] - flat[None]) ** 2).mean(-1))
    return float(distances.sum() / (len(flat) * (len(flat) - 1)))


def _by_class(labels: Sequence[int], pictures: Sequence[Picture]) -> dict[int, list[Picture]]:
    found: dict[int, list[Picture]] = defaultdict(list)
    for label, picture in zip(labels, pictures, strict=True):
        found[label].append(picture)
    return dict(sorted(found.items()))


def grid(labels: Sequence[int], pictures: Sequence[Picture], columns: int = 10) -> Picture:
    """The first pictures of every class, one class a row, on a grey ground: float32 [C, H, W].

    Every pixel becomes 4 x 4 of them.

    Args:
        labels: of the pictures.
        pictures: [C, H, W] each, or videos, of which a still is shown.
        columns: most of a class.
    """
    stills = [still(picture) for picture in pictures]
    lines = [own[:columns] for own in _by_class(labels, stills).values()]
    channels, height, width = stills[0].shape
    down, across = height * _SCALE + _GAP, width * _SCALE + _GAP
    sheet = np.full((channels, _GAP + down * len(lines), _GAP + across * max(map(len, lines))), 0.5, np.float32)
    for i, line in enumerate(lines):
        for j, picture in enumerate(line):
            top, left = _GAP + i * down, _GAP + j * across
            large = picture.repeat(_SCALE, 1).repeat(_SCALE, 2)
            sheet[:, top : top + height * _SCALE, left : left + width * _SCALE] = large
    return sheet


def as_image(picture: Picture) -> Image.Image:
    """A picture of one channel or three in bytes."""
    pixels = np.round(picture * 255).astype(np.uint8)
    return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))


def write_png(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Writes a picture of one channel or three."""
    as_image(picture).save(path, format="PNG")


def text(picture: Picture) -> str:
    """A picture or video in a few words: its size, its mean and how far pixels are from it."""
    frames = f", {len(picture)} frames" if picture.ndim == 4 else ""
    height, width = picture.shape[-2:]
    return f"({height} x {width}{frames}, mean {float(picture.mean()):.3f}, deviation {float(picture.std()):.3f})"
