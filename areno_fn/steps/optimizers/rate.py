"""From a direction to a step: the sign and the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.record import record
from areno_fn.steps.scaling import scaled


@record
class ScaleByLearningRateState:
    """How many updates were made, int64 [], and the rate of the latest one, float64 [], kept to be reported."""

    count: torch.Tensor
    rate: torch.Tensor

    def report(self) -> dict[str, torch.Tensor]:
        """The latest learning rate."""
        return {"lr": self.rate}


def scale_by_learning_rate(schedule: Callable[[torch.Tensor], torch.Tensor] | float) -> Transform:
    """Multiplies updates by minus the learning rate, so that adding them to parameters descends.

    Args:
        schedule: the rate as a function of the 1-based update, int64 [] -> float64 [], or a constant.
    """

    def init(params: Any) -> ScaleByLearningRateState:
        device = tree.leaves(params)[0].device
        return ScaleByLearningRateState(
            count=torch.zeros((), dtype=torch.int64, device=device),
            rate=torch.zeros((), dtype=torch.float64, device=device),
        )

    def update(updates: Any, state: ScaleByLearningRateState, params: Any) -> tuple[Any, ScaleByLearningRateState]:
        del params
        count = state.count + 1
        rate = torch.full_like(state.rate, schedule) if isinstance(schedule, int | float) else schedule(count)
        moves = scaled(tree.leaves(updates), -rate)
        return tree.unflatten(updates, moves), ScaleByLearningRateState(count=count, rate=rate)

    return Transform(init=init, update=update)
