"""`FlowPolicy`: what a flow-matching model answers, and the guidance that most of them mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

Guide = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(towards, away, scale, state, timestep) -> velocity [B, *]`: of the velocities [B, *] under the positive and the negative
conditions, asked for at a state and a time, and the weight of guidance."""


class FlowPolicy(Protocol):
    """A velocity field as a function of its parameters. B rows, * the shape of one latent."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape * of one latent."""
        ...

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity eps - x0 that points from data to noise, [B, *].

        A model that is trained with another sign or parametrisation is converted here, and nowhere else.

        Args:
            params: the parameters.
            state: [B, *].
            timestep: float32 [B], 1000 times the noise level.
            condition: a tree of tensors [B, ...].
        """
        ...

    @property
    def guide(self) -> Guide:
        """What makes the velocity of a guidance above 1, as the model is meant to be sampled; `straight` for most."""
        ...


@runtime_checkable
class Led(Protocol):
    """A policy that asks itself more than once under one condition where there is guidance; it then answers whole."""

    def led(
        self, params: Any, state: torch.Tensor, timestep: torch.Tensor, positive: Any, negative: Any, scale: float
    ) -> torch.Tensor:
        """The velocity [B, *] of a guidance above 1.

        Args:
            params, state, timestep: as of `velocity`.
            positive, negative: the conditions that it leads towards, and away from.
            scale: weight of guidance.
        """
        ...


def straight(
    towards: torch.Tensor, away: torch.Tensor, scale: float, state: torch.Tensor, timestep: torch.Tensor
) -> torch.Tensor:
    """Classifier-free guidance as it was published (arXiv 2207.12598): v- + scale (v+ - v-)."""
    del state, timestep
    return away + scale * (towards - away)
