"""The velocity of Qwen-Image and of its editions, whose pictures to go by follow the one that is made as more tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn.models.packing import packed


def velocity(
    forward: Callable[..., Any],
    state: torch.Tensor,
    timestep: torch.Tensor,
    condition: Mapping[str, Any],
    *,
    grid: tuple[int, int],
    side: int = 2,
) -> torch.Tensor:
    """The velocity [B, N, C] of states [B, N, C], which the transformer predicts as it is.

    Args:
        forward: the transformer, its parameters filled in.
        state: tokens of pictures, N = rows times columns.
        timestep: float32 [B], 1000 times the noise level.
        condition: "text" [B, L, D], "words" [B, L], nonzero where one of it is read, and perhaps "images", a tuple of
            normalised latents [B, c, h, w], in which a token is a patch.
        grid: rows and columns of tokens.
        side: of a patch.
    """
    images = tuple(condition.get("images", ()))
    tokens = torch.cat([state, *(packed(image.to(state.dtype), side) for image in images)], 1)
    shapes = [(1, *grid), *((1, image.shape[2] // side, image.shape[3] // side) for image in images)]
    (answer,) = forward(
        hidden_states=tokens,
        timestep=timestep / 1000,
        encoder_hidden_states=condition["text"].to(state.dtype),
        encoder_hidden_states_mask=condition["words"],
        img_shapes=[shapes] * state.shape[0],
        return_dict=False,
    )
    return answer[:, : state.shape[1]]


def guide(
    towards: torch.Tensor, away: torch.Tensor, scale: float, state: torch.Tensor, timestep: torch.Tensor
) -> torch.Tensor:
    """Guidance that keeps the length of every token of the velocity [B, N, C] that it leads towards."""
    del state, timestep
    combined = away + scale * (towards - away)
    length = combined.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # of a token that stands still
    return combined * (towards.norm(dim=-1, keepdim=True) / length)
