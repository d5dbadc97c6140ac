"""CLIP models as rewards: against the towers asked one by one, and what is wrong with a folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_folders import LONGEST, SIDE, write_clip

from areno_fn.contracts.errors import RewardError
from areno_fn.contracts.spec import ClipReward
from areno_fn.engine.reward_models import clip_content
from areno_fn.engine.rewards import Loaded, load_all
from areno_fn.world.clip_score import Clip, ClipScore
from areno_fn.world.rewards import score

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray[Any, Any]]:
    made = np.random.default_rng(0).random((5, 3, SIDE, SIDE), dtype=np.float32)
    return [np.round(picture * 255) / np.float32(255) for picture in made]


ROWS = [
    {"prompt": word, "label": place} for place, word in enumerate(["three", "a 4", "b", "three", "zebra crossing" * 4])
]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def by_hand(folder: Path, texts: list[str], pictures: list[np.ndarray[Any, Any]]) -> list[float]:
    """Cosines from the two towers and their projections, each asked about one sample at a time, without padding."""
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)
    found = []
    with torch.no_grad():
        for text, picture in zip(texts, pictures, strict=True):
            tokens = torch.tensor([tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"]])
            said = model.text_projection(model.text_model(input_ids=tokens).pooler_output)[0]
            pixels = (torch.from_numpy(picture) - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
            seen = model.visual_projection(model.vision_model(pixel_values=pixels[None]).pooler_output)[0]
            found.append(float(said @ seen / said.norm() / seen.norm()))
    return found


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_the_cosine_of_text_and_picture(folder: Path, pictures: list[Any], batch: int) -> None:
    judge = ClipScore(clip=Clip(path=str(folder), device=CPU), prompt="a digit {prompt} of {label}", batch=batch)
    texts = [f"a digit {row['prompt']} of {row['label']}" for row in ROWS]
    found = judge(ROWS, pictures)
    assert found == pytest.approx(by_hand(folder, texts, pictures), abs=1e-5)
    assert len(set(found)) == 5 and all(-1 <= value <= 1 for value in found)


def test_pickscore_is_scaled_by_the_temperature(folder: Path, pictures: list[Any]) -> None:
    clip = Clip(path=str(folder), device=CPU)
    plain, scaled = ClipScore(clip=clip)(ROWS, pictures), ClipScore(clip=clip, scaled=True)(ROWS, pictures)
    temperature = float(np.exp(2.6592))  # what CLIP begins with
    assert scaled == pytest.approx([temperature * value for value in plain], rel=1e-5)


def test_grey_pictures_are_judged_as_grey_ones_of_three_channels(folder: Path, pictures: list[Any]) -> None:
    judge = ClipScore(clip=Clip(path=str(folder), device=CPU))
    grey = [picture[:1] for picture in pictures]
    assert judge(ROWS, grey) == judge(ROWS, [np.repeat(picture, 3, axis=0) for picture in grey])


def test_rewards_of_one_folder_share_a_model_that_is_read_when_it_is_asked(folder: Path, pictures: list[Any]) -> None:
    specs = [
        ClipReward(path=str(folder), name="fit"),
        ClipReward(path=str(folder), scaled=True, weight=2.0, name="pick"),
    ]
    first, second = load_all(specs, Loaded(device=CPU))
    assert isinstance(first.function, ClipScore) and isinstance(second.function, ClipScore)
    assert first.function.clip is second.function.clip
    totals, parts = score((first, second), ROWS, pictures)
    assert totals == pytest.approx([a + 2 * b for a, b in zip(parts["fit"], parts["pick"], strict=True)])


def test_what_is_in_a_folder_counts(folder: Path, tmp_path: Path) -> None:
    same, other = write_clip(tmp_path / "same"), write_clip(tmp_path / "other", seed=1)
    assert clip_content(str(same)) == clip_content(str(folder)) != clip_content(str(other))


def test_a_folder_that_is_none_of_a_clip_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"config.json cannot be read \(.*\); give the folder of a CLIP model"):
        Clip(path=str(tmp_path), device=CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(RewardError, match="the model is of type 'bert', but pictures are judged by one of type 'clip'"):
        Clip(path=str(tmp_path), device=CPU)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    clip = Clip(path=str(tmp_path), device=CPU)
    with pytest.raises(RewardError, match="transformers cannot read this CLIP model"):
        ClipScore(clip=clip)(ROWS[:1], [np.zeros((1, 8, 8), np.float32)])


def test_without_transformers_one_sentence_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(RewardError, match="needs transformers, which is not installed; run pip install transformers"):
        Clip(path=str(folder), device=CPU)


def test_a_text_of_fields_that_are_not_there_names_those_that_are(folder: Path, pictures: list[Any]) -> None:
    reward = load_all([ClipReward(path=str(folder), prompt="a {word}", name="fit")], Loaded(device=CPU))
    with pytest.raises(
        RewardError, match=r"'a \{word\}' .* a row with label, prompt \(KeyError: 'word'\); name its fields"
    ):
        score(reward, ROWS, pictures)
