"""What stands between the transformers of the large families and a velocity: guidance, packing, experts, a given first frame."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flow_models import numbers

from areno_fn.models.flux2.velocity import places, text_places
from areno_fn.models.ltx2 import velocity as ltx2
from areno_fn.models.packing import packed, unpacked
from areno_fn.models.qwen_image import velocity as qwen_image
from areno_fn.models.wan import velocity as wan


def test_tokens_are_patches_whose_channel_is_slowest() -> None:
    latents = torch.arange(2 * 4 * 4).reshape(1, 2, 4, 4)
    tokens = packed(latents)
    assert tokens.shape == (1, 4, 8)
    assert tokens[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]
    video = numbers("video", 2, 3, 4, 6, 8)
    assert torch.equal(unpacked(packed(video, 2, 2), (2, 3, 4), 2, 2), video)


def test_tokens_of_flux2_stand_by_picture_row_and_column() -> None:
    assert places([(1, 2), (2, 1)], torch.device("cpu")).tolist() == [
        [0, 0, 0, 0], [0, 0, 1, 0], [10, 0, 0, 0], [10, 1, 0, 0],
    ]  # fmt: skip
    assert text_places(2, torch.device("cpu")).tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


def test_guidance_of_qwen_image_turns_tokens_and_keeps_their_length() -> None:
    towards, away = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]), torch.tensor([[[3.0, 0.0], [0.0, 0.0]]])
    found = qwen_image.guide(towards, away, 2.0, towards, torch.tensor([500.0]))
    # away + 2 (towards - away) = (3, 8), of length sqrt(73), brought to length 5
    assert torch.allclose(found[0, 0], torch.tensor([15.0, 40.0]) / 73**0.5)
    still = torch.zeros(1, 1, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(qwen_image.guide(still, still * 1, 2.0, still, torch.tensor([1.0])).sum(), [still])
    assert bool(slope.isfinite().all()) and not found[0, 1].any()


STREAMS = ltx2.Streams(grid=(1, 1, 2), channels=2, length=3, audio_channels=1)


def test_guidance_of_ltx2_keeps_the_deviation_of_each_stream() -> None:
    state, towards, away = (numbers(name, 2, 7) for name in ("state", "towards", "away"))
    time = torch.tensor([500.0, 250.0])
    found = ltx2.guide(towards, [(away, 2.0, 2.0)], state, time, streams=STREAMS, rescale=1.0)
    clean, plain = (state - (time / 1000)[:, None] * v for v in (found, towards))
    for part in (slice(0, 4), slice(4, 7)):
        assert torch.allclose(clean[:, part].std(1), plain[:, part].std(1), atol=1e-5)
    none = ltx2.guide(towards, [(away, 2.0, 2.0)], state, time, streams=STREAMS, rescale=0.0)
    assert torch.allclose(none, away + 3 * (towards - away), atol=1e-5)
    other = numbers("other", 2, 7)
    several = ltx2.guide(towards, [(away, 2.0, 6.0), (other, 1.0, 0.5)], state, time, streams=STREAMS, rescale=0.0)
    of_words, of_other = (torch.tensor([one] * 4 + [two] * 3) for one, two in ((2.0, 6.0), (1.0, 0.5)))
    assert torch.allclose(several, towards + of_words * (towards - away) + of_other * (towards - other), atol=1e-5)


def test_a_flat_latent_is_video_then_sound() -> None:
    latent = torch.arange(7.0)[None]
    video, audio = STREAMS.split(latent)
    assert video.tolist() == [[[0, 1], [2, 3]]] and audio.tolist() == [[[4], [5], [6]]]
    assert torch.equal(STREAMS.join(video, audio), latent) and STREAMS.numel == 7


@pytest.mark.parametrize("times", [[900.0, 100.0, 875.0], [900.0, 880.0, 875.0], [1.0, 2.0, 874.9]])
def test_every_row_is_answered_by_the_expert_of_its_level(times: list[float]) -> None:
    asked: list[tuple[str, int]] = []

    def expert(name: str, sign: float) -> Any:
        def answer(state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
            asked.append((name, state.shape[0]))
            return sign * (state + condition["text"]) + timestep[:, None]

        return answer

    state, told, time = numbers("state", 3, 2), {"text": numbers("text", 3, 2)}, torch.tensor(times)
    found = wan.by_level(expert("high", 1.0), expert("low", -1.0), state, time, told, 0.875)
    sign = torch.where(time >= 875, 1.0, -1.0)[:, None]
    assert torch.equal(found, sign * (state + told["text"]) + time[:, None])
    high = sum(one >= 875 for one in times)
    assert asked == [(name, count) for name, count in (("high", high), ("low", 3 - high)) if count]


def test_a_given_first_frame_is_reached_whatever_the_transformer_says_and_in_the_states_precision() -> None:
    seen: dict[str, torch.Tensor] = {}

    def forward(**inputs: Any) -> tuple[torch.Tensor]:
        seen.update(inputs)
        return (torch.full_like(inputs["hidden_states"], 7.0),)

    state, first = numbers("state", 1, 2, 3, 4, 4), numbers("first", 1, 2, 1, 4, 4)
    told = {"text": numbers("text", 1, 2, 2), "first": first}
    given = {"patch": (1, 2, 2), "dtype": torch.bfloat16, "times_of_patches": True}
    found = wan.velocity(forward, state, torch.tensor([400.0]), told, **given)
    assert found.dtype == torch.float32 and bool((found[:, :, 1:] == 7).all())
    assert torch.allclose(state[:, :, :1] - 0.4 * found[:, :, :1], first, atol=1e-6)
    assert seen["timestep"].tolist() == [[0.0] * 4 + [400.0] * 8]
    assert seen["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(seen["hidden_states"][:, :, :1], first.bfloat16())
