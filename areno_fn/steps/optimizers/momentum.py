"""Momentum of the gradient, as `torch.optim.SGD` has it."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.record import record


@record
class MomentumState:
    """The decaying sum of gradients, a tree like the parameters, float32 (float64 for float64 parameters)."""

    sum: Any


def momentum(decay: float = 0.9, nesterov: bool = False) -> Transform:
    """Replaces the gradient by m <- decay m + g; with nesterov, by g + decay m of that m."""

    def init(params: Any) -> MomentumState:
        return MomentumState(sum=tree.map(_zeros, params))

    def update(updates: Any, state: MomentumState, params: Any) -> tuple[Any, MomentumState]:
        del params
        gradient = tree.leaves(updates)
        total = torch._foreach_add(torch._foreach_mul(tree.leaves(state.sum), decay), gradient)
        moves = torch._foreach_add(gradient, total, alpha=decay) if nesterov else total
        return tree.unflatten(updates, moves), MomentumState(sum=tree.unflatten(state.sum, total))

    return Transform(init=init, update=update)


def _zeros(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
