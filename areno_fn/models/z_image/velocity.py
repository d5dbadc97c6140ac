"""The velocity of Z-Image, which counts time from noise to data and predicts the way from noise to data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def velocity(
    forward: Callable[..., Any],
    state: torch.Tensor,
    timestep: torch.Tensor,
    condition: Mapping[str, Any],
    *,
    side: int = 2,
    frames: int = 1,
) -> torch.Tensor:
    """The velocity [B, C, H, W] of states [B, C, H, W]: what the transformer predicts at (1000 - timestep) / 1000, negated.

    Args:
        forward: the transformer, its parameters filled in.
        state: latent pictures.
        timestep: float32 [B], 1000 times the noise level.
        condition: "text" [B, L, D] and "length" int64 [B], how many of its L features belong to each.
        side, frames: which of the patch sizes of the transformer is used.
    """
    lengths = condition["length"].tolist()
    texts = [text[:length] for text, length in zip(condition["text"].to(state.dtype), lengths, strict=True)]
    (answer,) = forward(
        list(state.unsqueeze(2).unbind()),
        (1000 - timestep) / 1000,
        texts,
        patch_size=side,
        f_patch_size=frames,
        return_dict=False,
    )
    return -torch.stack(answer).squeeze(2)
