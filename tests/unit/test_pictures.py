"""Pictures outside of a model: digits, their classifier, and what is measured and drawn of them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import DigitsData
from areno_fn.engine.digit_reward import Legible, labelled, trained_classifier
from areno_fn.engine.flow_medium import apart
from areno_fn.models.digit_classifier import LabelledPictures, blurred, init, logits
from areno_fn.world import digits, picture_rewards
from areno_fn.world.data import read_all
from areno_fn.world.gallery import Gallery
from areno_fn.world.pictures import diversity, grid, text
from areno_fn.world.trackers import TensorBoardTracker

TRAIN, HELD_OUT = digits.rows(DigitsData()), digits.rows(DigitsData(split="heldout"))


def test_every_digit_is_on_one_side_of_the_split() -> None:
    found = load_digits()
    assert len(TRAIN) + len(HELD_OUT) == len(found.target) == 1797
    assert 0.08 < len(HELD_OUT) / 1797 < 0.12
    assert not {row["picture"] for row in TRAIN} & {row["picture"] for row in HELD_OUT}
    for rows in (TRAIN, HELD_OUT):
        assert {row["label"] for row in rows} == set(range(10))
    first = np.asarray(TRAIN[0]["picture"]) * 16
    place = next(i for i, image in enumerate(found.images) if np.array_equal(image, first))
    assert TRAIN[0]["label"] == found.target[place] and TRAIN[0]["prompt"] == str(TRAIN[0]["label"])


def test_rows_say_where_they_are_from() -> None:
    rows = read_all([DigitsData(limit=2, name="a"), DigitsData(split="heldout", limit=1)])
    assert [(row.where, row.source) for row in rows] == [
        ("digits(train):1", "a"),
        ("digits(train):2", "a"),
        ("digits(heldout):1", "1"),
    ]


def test_diversity_is_the_mean_distance_within_a_class() -> None:
    """By hand: of class 0 the three distances are 1/2, 1 and 1/2, of class 1 the only one is 0, class 2 has one picture."""
    flat = [(0, 0.0), (1, 0.3), (0, 0.5), (2, 0.9), (0, 1.0), (1, 0.3)]
    pictures = [np.full((1, 2, 2), value, np.float32) for _, value in flat]
    assert diversity([label for label, _ in flat], pictures) == pytest.approx((2 / 3 + 0) / 2)
    one = np.zeros((1, 2, 2), np.float32)
    one[0, 0, 0] = 1
    assert diversity([4, 4], [one, np.zeros_like(one)]) == pytest.approx(np.sqrt(1 / 4))
    assert diversity([0, 1], pictures[:2]) is None
    assert apart([0, 1], pictures[:2]) == {} and apart([0, 0], pictures[:2]) == {"diversity": pytest.approx(0.3)}


def test_a_sheet_has_a_class_a_row() -> None:
    labels = [3, 1, 3, 3]
    pictures = [np.full((1, 2, 2), value, np.float32) for value in (0.1, 0.2, 0.3, 0.4)]
    sheet = grid(labels, pictures, columns=2)
    assert sheet.shape == (1, 2 + 2 * 10, 2 + 2 * 10)
    assert (sheet[0, 2:10, 2:10] == np.float32(0.2)).all(), "class 1 is the first row"
    assert (sheet[0, 12:20, 2:10] == np.float32(0.1)).all() and (sheet[0, 12:20, 12:20] == np.float32(0.3)).all()
    assert (sheet[0, 2:10, 12:20] == 0.5).all(), "nothing stands beside the only picture of class 1"


def test_a_gallery_keeps_files_and_tells(tmp_path: Path) -> None:
    told: list[tuple[int, str, tuple[int, ...]]] = []
    gallery = Gallery(tmp_path / "p", lambda step, name, sheet: told.append((step, name, sheet.shape)))
    colour = np.stack([np.full((2, 2), value, np.float32) for value in (0.0, 0.5, 1.0)])
    gallery.hang(7, "eval", [{"label": 0}], [colour])
    gallery.hang(7, "eval_ema", [{"label": 0}], [colour])
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["step-00000007-ema.png", "step-00000007.png"]
    assert Image.open(tmp_path / "p/step-00000007.png").getpixel((5, 5)) == (0, 128, 255)
    assert told == [(7, "eval/pictures", (3, 12, 12)), (7, "eval_ema/pictures", (3, 12, 12))]


def test_tensorboard_has_the_pictures(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.picture(3, "eval/pictures", np.full((1, 2, 2), 0.5, np.float32))
    tracker.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    (image,) = found.Images("eval/pictures")
    assert (image.step, image.width, image.height) == (3, 2, 2)
    assert Image.open(io.BytesIO(image.encoded_image_string)).convert("L").getpixel((1, 1)) == 127


def test_a_picture_is_told_in_a_few_words() -> None:
    assert text(np.array([[[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]], np.float32)) == "(2 x 3, mean 0.500, deviation 0.408)"


def test_rewards_without_a_model() -> None:
    half = np.array([[[0.0, 1.0], [0.0, 1.0]]], np.float32)
    assert picture_rewards.brightness({}, half) == 0.5
    assert picture_rewards.contrast({}, half) == 0.5
    noise = (np.arange(3 * 16 * 16).reshape(3, 16, 16) * 37 % 101 / 100).astype(np.float32)
    file = io.BytesIO()
    Image.fromarray(np.round(noise * 255).astype(np.uint8).transpose(1, 2, 0)).save(file, format="JPEG", quality=95)
    assert picture_rewards.jpeg_kilobytes({}, noise) == len(file.getvalue()) / 1000
    assert picture_rewards.jpeg_kilobytes({}, noise) > picture_rewards.jpeg_kilobytes({}, np.zeros_like(noise))


# ------------------------------------------------------------------------------------ the classifier


def test_the_classifier_reads_digits_it_has_not_seen() -> None:
    """At least as well as a logistic regression of another library on the same split."""
    judge = Legible()
    pictures = [np.asarray(row["picture"], np.float32)[None] for row in HELD_OUT]
    right = np.array(judge(HELD_OUT, pictures))
    assert (right > 0.5).mean() > 0.95 and right.mean() > 0.9
    x, y = (np.array([np.ravel(r["picture"]) for r in rows]) for rows in (TRAIN, HELD_OUT))
    peer = LogisticRegression(max_iter=200).fit(x, [r["label"] for r in TRAIN])
    accuracy = np.mean(peer.predict(y) == [r["label"] for r in HELD_OUT])
    assert (right > 0.5).mean() >= accuracy - 0.01
    wrong = [{"label": (row["label"] + 1) % 10} for row in HELD_OUT]
    assert np.mean(judge(wrong, pictures)) < 0.05
    assert np.mean(judge(HELD_OUT, [np.zeros((1, 8, 8), np.float32)] * len(HELD_OUT))) < 0.3


def test_the_classifier_is_a_function_of_its_key() -> None:
    x = labelled(HELD_OUT).pictures
    same, again, other = (logits(trained_classifier(Key.of(seed), 3), x) for seed in (0, 0, 1))
    assert torch.equal(same, again) and not torch.equal(same, other)


def test_pictures_of_another_size_are_refused() -> None:
    with pytest.raises(ModelError, match=r"reads pictures \[-1, 1, 8, 8\], received"):
        logits(init(Key.of(0)), torch.zeros(2, 1, 9, 8))


def test_blurring_moves_by_a_pixel_and_adds_noise() -> None:
    dot = torch.zeros(600, 1, 8, 8)
    dot[:, :, 4, 4] = 0.5
    batch = LabelledPictures(pictures=dot, labels=torch.zeros(600, dtype=torch.int64))
    still = blurred(batch, Key.of(1), most=0.0).pictures.reshape(600, 64)
    places = still.argmax(1)
    rows, columns = places // 8, places % 8
    assert set(rows.tolist()) == set(columns.tolist()) == {3, 4, 5}
    assert torch.bincount(rows * 8 + columns)[torch.tensor([27, 36, 45])].min() > 600 / 9 / 2
    assert (still.max(1).values == 0.5).all()
    noisy = blurred(batch, Key.of(1)).pictures.reshape(600, 64)
    spread = (noisy - still)[torch.arange(600), places].std()
    assert float(spread) == pytest.approx((0.3**2 / 3) ** 0.5, rel=0.15), "a uniform deviation up to 0.3"
