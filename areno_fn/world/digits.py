"""Real handwritten digits: the 1,797 pictures that scikit-learn carries, split into training and held-out ones."""

from __future__ import annotations

import hashlib
from functools import cache

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.spec import DigitPairsData, DigitsData
from areno_fn.world.data_row import Row

HELD_OUT = 10
"""One picture in so many is held out."""

_STRIDE = 389
"""Pictures that are rejected are taken so far apart."""

_LARGEST = 16
"""The darkest ink in the source, whose pixels are whole numbers."""

Picture = tuple[tuple[float, ...], ...]


def rows(spec: DigitsData) -> list[Row]:
    """The pictures of a split, in the order of the source: `{"prompt": "3", "label": 3, "picture": ((0.0, ...), ...)}`.

    A picture is eight rows of eight numbers from 0, paper, to 1, ink. Which side of the split it is on depends on its
    pixels alone, so that no picture is on both.

    Raises:
        DataError: scikit-learn is not installed, or the split has fewer pictures than `limit`.
    """
    name, wanted = f"digits({spec.split})", _split(spec)
    return [
        Row({"prompt": str(label), "label": label, "picture": picture}, name, place)
        for place, (label, picture) in enumerate(wanted[: spec.limit or None], 1)
    ]


def pairs(spec: DigitPairsData) -> list[Row]:
    """A pair for every picture of a split: `{"prompt": "3", "label": 3, "chosen": picture, "rejected": picture}`.

    What is rejected is the first picture of another class after a place that is far from the chosen one's.

    Raises:
        DataError: as `rows`.
    """
    name, wanted = f"digit_pairs({spec.split})", _split(spec)
    found = []
    for place, (label, picture) in enumerate(wanted[: spec.limit or None]):
        other = (place * _STRIDE + len(wanted) // 2) % len(wanted)
        while wanted[other][0] == label:
            other = (other + 1) % len(wanted)
        row = {"prompt": str(label), "label": label, "chosen": picture, "rejected": wanted[other][1]}
        found.append(Row(row, name, place + 1))
    return found


def _split(spec: DigitsData | DigitPairsData) -> list[tuple[int, Picture]]:
    """The pictures of a split with their classes, of which there are at least as many as `limit` asks for."""
    wanted = [(label, picture) for label, picture in _all() if held_out(picture) == (spec.split == "heldout")]
    if spec.limit > len(wanted):
        name = f"{type(spec).__struct_config__.tag}({spec.split})"
        raise DataError(f"{name} has {len(wanted)} pictures, but limit asks for {spec.limit}; lower it")
    return wanted


def held_out(picture: Picture) -> bool:
    """Whether a picture is held out: the SHA-256 of its pixels, each a byte, modulo 10 is 0."""
    pixels = bytes(round(pixel * _LARGEST) for line in picture for pixel in line)
    return int.from_bytes(hashlib.sha256(pixels).digest()[:8], "big") % HELD_OUT == 0


@cache
def _all() -> tuple[tuple[int, Picture], ...]:
    try:
        from sklearn.datasets import load_digits  # seconds of imports, for those who want it
    except ImportError:
        raise DataError(
            "the data kind 'digits' needs scikit-learn, which is not installed; run pip install scikit-learn"
        ) from None
    found = load_digits()
    pictures = (found.images / _LARGEST).tolist()
    return tuple(
        (int(label), tuple(tuple(line) for line in picture))
        for label, picture in zip(found.target.tolist(), pictures, strict=True)
    )
