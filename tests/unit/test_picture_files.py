"""Files of pictures: what would lose something is refused, and what cannot be read is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from areno_fn.contracts.errors import DataError
from areno_fn.world.data_row import Row
from areno_fn.world.picture_files import look, pixels
from areno_fn.world.prompted import shot_of

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 4, 3)).astype(np.uint8)


def row(folder: Path) -> Row:
    return Row({"prompt": "a"}, file=str(folder / "rows.jsonl"), line=1)


def turned(path: Path) -> None:
    image = Image.fromarray(COLOURS)
    said = image.getexif()
    said[0x0112] = 6
    image.save(path, format="JPEG", exif=said)


def half(path: Path) -> None:
    Image.fromarray(np.zeros((64, 64, 3), np.uint8) + COLOURS[0, 0]).save(path, format="PNG")
    path.write_bytes(path.read_bytes()[:60])


def moving(path: Path) -> None:
    first, second = Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)
    first.save(path, format="GIF", save_all=True, append_images=[second])


def clear(path: Path) -> None:
    Image.fromarray(np.dstack([COLOURS, np.full((6, 4), 200, np.uint8)])).save(path, format="PNG")


def clear_palette(path: Path) -> None:
    Image.fromarray(COLOURS).convert("P").save(path, format="PNG", transparency=0)


def deep(path: Path) -> None:
    Image.fromarray(np.full((6, 4), 40000, np.uint16)).save(path, format="PNG")


def of_floats(path: Path) -> None:
    Image.fromarray(np.full((6, 4), 0.5, np.float32)).save(path, format="TIFF")


def of_inks(path: Path) -> None:
    Image.fromarray(COLOURS).convert("CMYK").save(path, format="JPEG")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (deep, "has pixels of the mode 'I;16', which are not three colours of 8 bits"),
        (of_floats, "has pixels of the mode 'F'"),
        (of_inks, "has pixels of the mode 'CMYK'"),
        (moving, "has 2 frames; give each as a file of its own"),
        (turned, "is to be turned, as its EXIF orientation says"),
        (clear, "can be seen through; lay it on a ground"),
        (clear_palette, "can be seen through"),
        (half, "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read (it is in no format of pictures that is known here)"),
        (lambda path: path.write_text("hello"), "cannot be read (it is in no format of pictures that is known here)"),
        (os.mkfifo, "cannot be read (it is no regular file)"),
        (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
    ],
)
def test_a_picture_that_would_lose_something_is_refused(
    write: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "one.png")
    with pytest.raises(DataError) as found:
        shot_of(row(tmp_path), "one.png", "image")
    assert words in str(found.value) and "rows.jsonl:1: the picture" in str(found.value)


@pytest.mark.parametrize("form", ["JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "TGA", "PNG"])
@pytest.mark.parametrize("part", [0.5, 0.99])
def test_a_file_that_ends_early_is_found_before_its_batch_comes(form: str, part: float, tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 48, 3)).astype(np.uint8)
    path = tmp_path / "one"
    Image.fromarray(noise).save(path, format=form)
    assert look(path, "").size == (64, 48)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the picture .*/one cannot be read \(.*\)$"):
        shot_of(row(tmp_path), "one", "image")


@pytest.mark.parametrize("name", ["none.png", "a\0b", "", "x" * 5000])
def test_a_path_that_leads_to_no_picture_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the picture .* cannot be read") as found:
        shot_of(row(tmp_path), name, "image")
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA"])
def test_what_becomes_three_colours_without_a_choice_is_taken(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(COLOURS).convert(mode)
    image.save(tmp_path / "one.png")
    shot = shot_of(row(tmp_path), "one.png", "image")
    assert shot.shape == (3, 6, 4) and look(tmp_path / "one.png", "").size == (6, 4)
    expected = np.asarray(image.convert("RGB"), np.float64).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(shot.read().numpy(), expected, atol=1e-7)


def test_a_file_that_changes_while_a_run_goes_on_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.fromarray(COLOURS).save(path)
    shot = shot_of(row(tmp_path), "one.png", "image")
    assert torch.equal(pixels(path, ""), shot.read())
    Image.fromarray(COLOURS[:3]).save(path)
    with pytest.raises(DataError, match="is 3 x 4, but was 6 x 4 as the run began"):
        shot.read()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read"):
        shot.read()
