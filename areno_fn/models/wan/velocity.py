"""The velocity of Wan 2.1 and 2.2: one transformer, or two that share the noise levels between them."""

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
    patch: tuple[int, int, int],
    dtype: torch.dtype,
    times_of_patches: bool = False,
    pairs: bool = False,
) -> torch.Tensor:
    """The velocity [B, C, F, H, W] of states [B, C, F, H, W], which the transformer predicts as it is.

    A clean first frame takes the place of the state's, whose own velocity points away from it: however it is sampled, it
    ends there, and no parameter has a say in it.

    Args:
        forward: the transformer, its parameters filled in.
        state: latent videos.
        timestep: float32 [B], 1000 times the noise level.
        condition: "text" [B, L, D]; perhaps "channels" [B, c, F, H, W], which are laid behind those of the state; "first"
            [B, C, 1, H, W], a clean first frame in the place of the state's; "features" [B, P, E] of an image.
        patch: frames, rows and columns of a patch.
        dtype: of the transformer; a clean first frame's velocity keeps that of the state.
        times_of_patches: every patch is told its own time, 0 where the frame is a clean one (Wan 2.2 5B).
        pairs: the features are of two images, each with positions of its own.
    """
    given, time = state, timestep
    if "first" in condition:
        given = torch.cat([condition["first"].to(state.dtype), state[:, :, 1:]], 2)
    if "channels" in condition:
        given = torch.cat([given, condition["channels"].to(state.dtype)], 1)
    if times_of_patches:
        time = _times(timestep, state, patch, clean="first" in condition)
    features = condition.get("features")
    if features is not None:
        features = features.to(dtype)
        features = features.unflatten(1, (2, -1)).flatten(0, 1) if pairs else features
    (answer,) = forward(
        hidden_states=given.to(dtype),
        timestep=time,
        encoder_hidden_states=condition["text"].to(dtype),
        encoder_hidden_states_image=features,
        return_dict=False,
    )
    if "first" not in condition:
        return answer
    away = (state[:, :, :1] - condition["first"]) / (timestep / 1000)[:, None, None, None, None]
    return torch.cat([away, answer[:, :, 1:].to(away.dtype)], 2)


def by_level(
    high: Callable[..., torch.Tensor],
    low: Callable[..., torch.Tensor],
    state: torch.Tensor,
    timestep: torch.Tensor,
    condition: Mapping[str, Any],
    boundary: float,
) -> torch.Tensor:
    """The velocity [B, *] that one of two experts has for every row.

    Args:
        high, low: `(state, timestep, condition) -> velocity`, the expert of the levels from the boundary up, and that of
            those below. One that no row is for is not asked.
        state, timestep, condition: as of `velocity`.
        boundary: a noise level between 0 and 1.
    """
    noisy = timestep >= boundary * 1000
    if bool(noisy.all()):
        return high(state, timestep, condition)
    if not bool(noisy.any()):
        return low(state, timestep, condition)
    places = [chosen.nonzero()[:, 0] for chosen in (noisy, ~noisy)]
    parts = [
        expert(state[rows], timestep[rows], {name: x[rows] for name, x in condition.items()})
        for expert, rows in zip((high, low), places, strict=True)
    ]
    return torch.cat(parts)[torch.cat(places).argsort()]


def _times(timestep: torch.Tensor, state: torch.Tensor, patch: tuple[int, int, int], *, clean: bool) -> torch.Tensor:
    """The time of every patch, [B, N]."""
    frames, height, width = (size // side for size, side in zip(state.shape[2:], patch, strict=True))
    noisy = torch.ones(frames, height * width, device=state.device)
    if clean:
        noisy[0] = 0
    return timestep[:, None] * noisy.flatten()
