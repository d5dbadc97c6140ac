"""Classifier-free guidance (arXiv 2207.12598): one function, used in sampling and in training alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_policy import FlowPolicy

Ask = Callable[[Any, torch.Tensor, torch.Tensor, Conditions], torch.Tensor]
"""`(params, state [B, *], timestep [B], conditions) -> velocity [B, *]`."""


def guided(policy: FlowPolicy, scale: float) -> Ask:
    """The guided velocity, which `policy.guide` makes of v+ and v-; with a scale of 1 the model is asked for v+ alone.

    Both are asked for in one batch, the negative conditions first.

    Args:
        policy: the model.
        scale: weight of guidance, at least 1.
    """

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
