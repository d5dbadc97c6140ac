"""The velocity of LTX-2: video and sound are one flat latent, the tokens of the video first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch


@attrs.frozen(kw_only=True)
class Streams:
    """What a flat latent [B, n] is made of, in the order of its numbers.

    Attributes:
        grid: F, H, W of the video's tokens.
        channels: of a token of the video.
        length: tokens of the sound.
        audio_channels: of a token of the sound.
    """

    grid: tuple[int, int, int]
    channels: int
    length: int
    audio_channels: int

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of each component, in order."""
        frames, height, width = self.grid
        return {"video": frames * height * width * self.channels, "audio": self.length * self.audio_channels}

    @property
    def numel(self) -> int:
        """All of them together."""
        return sum(self.sizes.values())

    def split(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, F H W, channels] of the video and [B, length, audio_channels] of the sound."""
        video, audio = latent.split(list(self.sizes.values()), 1)
        return video.unflatten(1, (-1, self.channels)), audio.unflatten(1, (-1, self.audio_channels))

    def join(self, video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`."""
        return torch.cat([video.flatten(1), audio.flatten(1)], 1)


def velocity(
    forward: Callable[..., Any],
    state: torch.Tensor,
    timestep: torch.Tensor,
    condition: Mapping[str, Any],
    *,
    streams: Streams,
    rate: float,
    cross_timestep: bool = True,
    perturbed: Sequence[int] = (),
    isolated: bool = False,
) -> torch.Tensor:
    """The velocity [B, n] of states [B, n], both streams at one noise level.

    Args:
        forward: the transformer, its parameters filled in.
        state: flat latents.
        timestep: float32 [B], 1000 times the noise level.
        condition: "text" [B, L, D] and "audio_text" [B, L, E], as the connectors gave them, and "words" [B, L], which of them are.
        streams: what is in a latent.
        rate: frames a second.
        cross_timestep: attention between the streams is modulated by the level of the other one (LTX-2.3), not by its own.
        perturbed: blocks in which a token takes its own value in the place of attention to its stream.
        isolated: the streams do not attend to each other.
    """
    video, audio = streams.split(state)
    frames, height, width = streams.grid
    answer = forward(
        hidden_states=video,
        audio_hidden_states=audio,
        encoder_hidden_states=condition["text"].to(state.dtype),
        audio_encoder_hidden_states=condition["audio_text"].to(state.dtype),
        timestep=timestep,
        sigma=timestep,
        encoder_attention_mask=condition["words"],
        audio_encoder_attention_mask=condition["words"],
        num_frames=frames,
        height=height,
        width=width,
        fps=rate,
        audio_num_frames=streams.length,
        use_cross_timestep=cross_timestep,
        spatio_temporal_guidance_blocks=list(perturbed) or None,
        isolate_modalities=isolated,
        return_dict=False,
    )
    return streams.join(*answer)


def guide(
    towards: torch.Tensor,
    away: Sequence[tuple[torch.Tensor, float, float]],
    state: torch.Tensor,
    timestep: torch.Tensor,
    *,
    streams: Streams,
    rescale: float,
) -> torch.Tensor:
    """Guidance of each stream, its clean latents brought back to the deviation of those it leads towards (arXiv 2305.08891).

    With v+ the velocity that is led, it is v+ + sum of w (v+ - v-) over all that it is led away from.

    Args:
        towards: velocities [B, n].
        away: other velocities [B, n], each with w of the video and of the sound.
        state, timestep: where they were asked for.
        streams: what is in a latent.
        rescale: share of the correction, 0 for none.
    """
    level = (timestep / 1000)[:, None]
    clean = streams.split(state - level * towards)
    others = [(streams.split(state - level * other), weights) for other, *weights in away]
    parts = []
    for place, plain in enumerate(clean):
        led = plain
        for other, weights in others:
            led = led + weights[place] * (plain - other[place])
        ratio = plain.std((1, 2), keepdim=True) / led.std((1, 2), keepdim=True)
        parts.append(rescale * (led * ratio) + (1 - rescale) * led)
    return (state - streams.join(*parts)) / level
