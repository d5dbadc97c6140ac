"""Pictures of files: looked at when rows are read, and read when their batch comes.

A picture is three colours of 8 bits, or what becomes that without a choice. What would lose something is refused: the bits of
deeper pixels, what can be seen through, later frames, and a turn that a camera wrote beside the pixels.
"""

from __future__ import annotations

import io
from pathlib import Path

import attrs
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from areno_fn.contracts.errors import DataError
from areno_fn.world.regular_files import require_regular

_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_ORIENTATION = 0x0112
_DAMAGED = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises of files that are no pictures: SyntaxError for a broken chunk of a PNG."""


@attrs.frozen
class Look:
    """What a file is, without its pixels.

    Attributes:
        size: height and width.
        content: its bytes.
    """

    size: tuple[int, int]
    content: bytes


def look(path: Path, where: str) -> Look:
    """Looks at a file.

    Args:
        where: the row that names it.

    Raises:
        DataError: it cannot be read, or is not three colours of 8 bits.
    """
    try:
        require_regular(path)
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            size, problem = (image.size[1], image.size[0]), _problem(image)
        if not problem:
            _require_whole(content)
    except _DAMAGED as error:
        raise DataError(_unreadable(path, where, error)) from error
    if problem:
        raise DataError(f"{where}: the picture {shown(path)} {problem}")
    return Look(size=size, content=content)


def pixels(path: Path, where: str) -> torch.Tensor:
    """Its numbers, float32 [3, H, W] from 0 to 1.

    Raises:
        DataError: it can no longer be read.
    """
    try:
        with Image.open(path) as image:
            found = np.asarray(image.convert("RGB"), np.float32)
    except _DAMAGED as error:
        raise DataError(_unreadable(path, where, error)) from error
    return torch.from_numpy(found / 255).permute(2, 0, 1).contiguous()


def _require_whole(content: bytes) -> None:
    """Raises what Pillow raises of files that end too early; of a PNG the checksums say so, others are decoded for it."""
    with Image.open(io.BytesIO(content)) as image:
        if image.format == "PNG":
            image.verify()
            return
        image.draft("RGB", (1, 1))  # a JPEG at an eighth of its size takes a fraction of the time
        image.load()


def _problem(image: Image.Image) -> str:
    if image.mode not in _MODES:
        return f"has pixels of the mode {image.mode!r}, which are not three colours of 8 bits; convert it to RGB"
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        return f"has {frames} frames; give each as a file of its own"
    if image.getexif().get(_ORIENTATION, 1) != 1:
        return "is to be turned, as its EXIF orientation says; turn its pixels, or remove that"
    if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] != 255:
        return "can be seen through; lay it on a ground, and convert it to RGB"
    return ""


def shown(path: Path) -> str:
    """A path in a sentence."""
    text = str(path) if str(path).isprintable() else repr(str(path))
    return text if len(text) <= 300 else f"{text[:297]}..."


def _unreadable(path: Path, where: str, error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
    if isinstance(error, UnidentifiedImageError):
        reason = "it is in no format of pictures that is known here"
    return f"{where}: the picture {shown(path)} cannot be read ({reason})"
