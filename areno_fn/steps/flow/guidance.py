"""Classifier-free guidance (arXiv 2207.12598): one function, used in sampling and in training alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_policy import FlowPolicy

Ask = Callable[[Any, torch.Tensor, torch.Tensor, Conditions], torch.Tensor]
"""`(params, state [B, *], timestep [B], conditions) -> velocity [B, *]`."""


def require_policy(policy: object, *names: str) -> None:
    """Refuses what is no `FlowPolicy` for want of one of the names.

    Raises:
        SpecError: names what is missing.
    """
    missing = [name for name in names if not hasattr(policy, name)]
    if missing:
        raise SpecError(
            f"the policy {type(policy).__name__} has no {missing[0]!r}; a FlowPolicy has latent_shape, a tuple, "
            f"velocity(params, state, timestep, condition) and guide, for example areno_fn.contracts.flow.straight"
        )


def guided(policy: FlowPolicy, scale: float) -> Ask:
    """The guided velocity, which `policy.guide` makes of v+ and v-; with a scale of 1 the model is asked for v+ alone.

    Both are asked for in one batch, the negative conditions first.

    Args:
        policy: the model.
        scale: weight of guidance, at least 1.

    Raises:
        SpecError: the policy has no velocity, or no guide where the scale asks for one.
    """
    require_policy(policy, "velocity", *(("guide",) if scale != 1 else ()))

    def ask(params: Any, state: torch.Tensor, timestep: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        if scale == 1:
            return policy.velocity(params, state, timestep, conditions.positive)
        if conditions.negative is None:
            raise RecordError(f"guidance of {scale} needs Conditions.negative, but there are none")
        both = tree.map(lambda a, b: torch.cat([a, b]), conditions.negative, conditions.positive)
        answer = policy.velocity(params, torch.cat([state, state]), torch.cat([timestep, timestep]), both)
        away, towards = answer.tensor_split(2)
        return policy.guide(towards, away, scale, state, timestep)

    return ask
