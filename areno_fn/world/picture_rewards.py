"""Rewards of pictures that need no model. Each takes `(row, picture)`, a float32 array [C, S, S] from 0 to 1."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from areno_fn.world.pictures import Picture, as_image, still


def brightness(row: Mapping[str, Any], picture: Picture) -> float:
    """The mean of all numbers of a picture."""
    del row
    return float(picture.mean())


def contrast(row: Mapping[str, Any], picture: Picture) -> float:
    """The population standard deviation of all numbers of a picture."""
    del row
    return float(picture.std())


def jpeg_kilobytes(row: Mapping[str, Any], picture: Picture) -> float:
    """Thousands of bytes of a picture as a JPEG file of quality 95, its header included; with weight -1, compressibility."""
    del row
    file = io.BytesIO()
    as_image(still(picture)).save(file, format="JPEG", quality=95)
    return len(file.getvalue()) / 1000
