"""The velocity of Flux.2: tokens of the picture, behind them those of pictures to go by, and where each stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from areno_fn.models.packing import packed

REFERENCE_STEP = 10
"""How far apart, along the first axis of positions, the picture and each of those to go by stand."""


def velocity(
    forward: Callable[..., Any],
    state: torch.Tensor,
    timestep: torch.Tensor,
    condition: Mapping[str, Any],
    *,
    grid: tuple[int, int],
    guidance: float | None,
) -> torch.Tensor:
    """The velocity [B, N, C] of states [B, N, C], which the transformer predicts as it is.

    Args:
        forward: the transformer, its parameters filled in.
        state: tokens of pictures, N = rows times columns.
        timestep: float32 [B], 1000 times the noise level.
        condition: "text" [B, L, D] and perhaps "images", a tuple of normalised latents [B, C, H, W], one token a place.
        grid: rows and columns of tokens.
        guidance: the scale that a distilled model is told; None for one that takes none.
    """
    text, images = condition["text"], tuple(condition.get("images", ()))
    tokens = torch.cat([state, *(packed(image.to(state.dtype), 1) for image in images)], 1)
    told = None if guidance is None else torch.full_like(timestep, guidance)
    (answer,) = forward(
        hidden_states=tokens,
        timestep=timestep / 1000,
        guidance=told,
        encoder_hidden_states=text.to(state.dtype),
        txt_ids=text_places(text.shape[1], state.device),
        img_ids=places([grid, *(image.shape[2:] for image in images)], state.device),
        return_dict=False,
    )
    return answer[:, : state.shape[1]]


def places(grids: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Positions int64 [N, 4] of the tokens of pictures: picture, row, column, 0; the first picture is the one that is made."""
    found = []
    for number, (rows, columns) in enumerate(grids):
        axes = [torch.tensor([REFERENCE_STEP * number]), torch.arange(rows), torch.arange(columns), torch.arange(1)]
        found.append(torch.cartesian_prod(*axes))
    return torch.cat(found).to(device)


def text_places(length: int, device: torch.device) -> torch.Tensor:
    """Positions int64 [L, 4] of a text: 0, 0, 0, place."""
    return torch.nn.functional.pad(torch.arange(length, device=device)[:, None], (3, 0))
