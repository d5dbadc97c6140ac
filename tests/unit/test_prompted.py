"""Rows of prompts with pictures, videos and sound: what each key means, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.media import Request
from areno_fn.world.data_row import Row
from areno_fn.world.pictures import diversity, grid, still, subjects, text
from areno_fn.world.prompted import demonstration, preference, request_of


def row(folder: Path, **values: Any) -> Row:
    return Row(values, str(folder / "rows.jsonl"), 3)


def save(path: Path, value: int, size: tuple[int, int] = (4, 6), mode: str = "RGB") -> str:
    Image.new(mode, (size[1], size[0]), value if mode == "L" else (value,) * 3).save(path)
    return path.name


NUMBERS = np.linspace(0, 1, 3 * 2 * 2).reshape(3, 2, 2).tolist()


@pytest.mark.parametrize("byte", [0, 127, 255])
def test_41_bytes_become_numbers_from_0_to_1_once(byte: int, tmp_path: Path) -> None:
    for mode in ("RGB", "L"):
        shown = demonstration(row(tmp_path, prompt="a", image=save(tmp_path / "x.png", byte, mode=mode)), 0, ("image",))
        shot = shown.shown[0]["image"]
        assert shot.shape == (3, 4, 6)
        assert torch.equal(shot.read(), torch.full((3, 4, 6), byte / 255))


def test_numbers_stand_as_they_are_and_the_row_keeps_its_place(tmp_path: Path) -> None:
    found = demonstration(row(tmp_path, prompt="a", negative_prompt="b", image=NUMBERS), 7, ("image",))
    assert torch.equal(found.shown[0]["image"].read(), torch.tensor(NUMBERS))
    assert (found.row, found.request.prompt, found.request.negative_prompt) == (7, "a", "b")


def test_a_preference_shows_two_and_a_video_is_its_frames(tmp_path: Path) -> None:
    first, second = save(tmp_path / "x.png", 0), save(tmp_path / "y.png", 255)
    pair = preference(row(tmp_path, prompt="a", chosen=first, rejected=second), 0, ("image",))
    assert [float(shots["image"].read().mean()) for shots in pair.shown] == [0, 1]
    film = demonstration(row(tmp_path, prompt="a", video=[first, second]), 0, ("video",)).shown[0]["video"]
    assert film.shape == (2, 3, 4, 6) and film.read().mean((1, 2, 3)).tolist() == [0, 1]
    both = {"video": [NUMBERS, NUMBERS], "audio": [[0.5, -0.5]]}
    loud = preference(row(tmp_path, prompt="a", chosen=both, rejected=both), 0, ("video", "audio"))
    assert {type: shot.shape for type, shot in loud.shown[1].items()} == {"video": (2, 3, 2, 2), "audio": (1, 2)}


def test_4_content_follows_the_bytes_of_a_file_and_not_its_name(tmp_path: Path) -> None:
    def content(name: str, **more: Any) -> bytes:
        return demonstration(row(tmp_path, prompt="a", image=name, **more), 0, ("image",)).content

    first = content(save(tmp_path / "x.png", 3))
    assert content(save(tmp_path / "y.png", 3)) == first
    assert content(save(tmp_path / "x.png", 4)) != first
    assert content("y.png", negative_prompt="b") != first


def test_given_media_have_a_type_and_perhaps_a_slot(tmp_path: Path) -> None:
    name = save(tmp_path / "x.png", 255)
    given = [name, {"image": name, "slot": "last"}, {"video": [name, name]}]
    found = request_of(row(tmp_path, prompt="a", inputs=given)).media
    assert [(one.type, one.slot, tuple(one.data.shape)) for one in found] == [
        ("image", "", (3, 4, 6)), ("image", "last", (3, 4, 6)), ("video", "", (2, 3, 4, 6)),
    ]  # fmt: skip


def test_a_given_video_stays_in_its_files_until_it_is_needed(tmp_path: Path) -> None:
    def given() -> Request:
        return request_of(row(tmp_path, prompt="a", inputs=[{"video": [dark, light]}]))

    dark, light = save(tmp_path / "x.png", 0), save(tmp_path / "y.png", 255)
    first = given()
    (film,) = first.media
    assert film.shape == (2, 3, 4, 6) and not isinstance(film.source, torch.Tensor)
    assert film.data.mean((1, 2, 3)).tolist() == [0, 1]
    assert first.fingerprint == given().fingerprint
    save(tmp_path / "y.png", 254)
    assert film.data[1].max() == pytest.approx(254 / 255)
    assert first.fingerprint != given().fingerprint
    save(tmp_path / "y.png", 255, size=(6, 6))
    with pytest.raises(DataError, match=r"the picture .*y.png is 6 x 6, but was 4 x 6 as the run began"):
        _ = film.data


def test_a_file_that_ends_early_is_reported_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"rows.jsonl:3: the picture .*x.png cannot be read \("):
        demonstration(row(tmp_path, prompt="a", image="x.png"), 0, ("image",))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "the row has no fields, but no 'prompt'"),
        (
            {"text": "a", "image": "x.png"},
            r"the row has image, text, but no 'prompt'; .* columns = { prompt = \"its name\" }",
        ),
        ({"prompt": None}, "a row needs a prompt in words, received NoneType"),
        ({"prompt": "a", "negative_prompt": 3}, "negative_prompt must be words, received int"),
        ({"prompt": "a", "inputs": "x.png"}, "inputs must be a list, received str"),
        (
            {"prompt": "a", "inputs": [{"slot": "x"}]},
            "one of inputs is {image, video or audio, and perhaps slot}, received slot",
        ),
        ({"prompt": "a", "inputs": [{"image": NUMBERS, "where": 1}]}, "received image, where"),
        ({"prompt": "a"}, "the row needs image, but has prompt"),
        ({"prompt": "a", "image": "none.png"}, "none.png cannot be read"),
        ({"prompt": "a", "image": "words.png"}, "words.png cannot be read"),
        (
            {"prompt": "a", "image": [[1.0, 0.0]]},
            r"image must be a path or numbers \[3, H, W\], received the shape \[1, 2\]",
        ),
        ({"prompt": "a", "image": 7}, r"image must be a path or numbers \[3, H, W\], received 7"),
        ({"prompt": "a", "image": None}, "image must be a path or numbers .*, received None"),
        ({"prompt": "a", "image": [[[None]]] * 3}, r"image must be .*, received \[\[\[None"),
        ({"prompt": "a", "image": [[["0.5"]]] * 3}, r"image must be .*, received \[\[\['0.5'"),
        ({"prompt": "a", "image": [[[True]]] * 3}, r"image must be .*, received \[\[\[True"),
        ({"prompt": "a", "image": [[[0.5]], [[0.5]], [[0.5, 0.5]]]}, r"image must be .*, received \[\[\[0.5"),
        ({"prompt": "a", "image": []}, r"image must be .*, received the shape \[0\]"),
        ({"prompt": "a", "image": {"x": 1}}, r"image must be a path or numbers \[3, H, W\], received {'x': 1}"),
        ({"prompt": "a", "image": [[[255.0]], [[0.0]], [[0.0]]]}, "holds numbers from 0 to 1, received 0 to 255"),
        ({"prompt": "a", "image": ["x.png", "x.png"]}, "an image is one file, received 2"),
    ],
)
def test_rows_that_cannot_be_used_say_where_they_are(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    save(tmp_path / "x.png", 1)
    (tmp_path / "words.png").write_text("words")
    with pytest.raises(DataError, match=words) as found:
        demonstration(row(tmp_path, **values), 0, ("image",))
    assert str(found.value).startswith(str(tmp_path / "rows.jsonl:3"))


def test_a_pair_that_lacks_a_side_and_frames_of_two_sizes_are_refused(tmp_path: Path) -> None:
    small, large = save(tmp_path / "x.png", 1), save(tmp_path / "y.png", 1, size=(8, 6))
    with pytest.raises(DataError, match="the row has no 'rejected'"):
        preference(row(tmp_path, prompt="a", chosen=small), 0, ("image",))
    with pytest.raises(DataError, match=r"the frames of a video have one size, received \(4, 6\) and \(8, 6\)"):
        demonstration(row(tmp_path, prompt="a", video=[small, large]), 0, ("video",))
    with pytest.raises(DataError, match="chosen needs video and audio, but is 'x.png'"):
        preference(row(tmp_path, prompt="a", chosen=small, rejected=small), 0, ("video", "audio"))


def test_what_pictures_are_of_is_their_label_or_their_prompt() -> None:
    assert subjects([{"label": 3}, {"label": 1}]) == [3, 1]
    assert subjects([{"prompt": "b"}, {"prompt": "a"}, {"prompt": "b"}]) == [0, 1, 0]
    film = np.stack([np.full((3, 2, 2), shade, np.float32) for shade in (0.0, 0.9, 0.2)])
    assert float(still(film).mean()) == pytest.approx(0.9) and still(film[0]).shape == (3, 2, 2)
    assert text(film) == "(2 x 2, 3 frames, mean 0.367, deviation 0.386)"
    assert grid([0, 0], [film, film]).shape == grid([0, 0], [film[1], film[1]]).shape
    assert diversity([0, 0], [film, film]) == 0
