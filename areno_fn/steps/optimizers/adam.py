"""Scaling by first and second moments (Adam, arXiv 1412.6980)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.record import record
from areno_fn.steps.reduce import wide
from areno_fn.steps.scaling import Leaves, fitting


@record
class ScaleByAdamState:
    """The moments of the gradient.

    Attributes:
        count: int64 [], updates made.
        mu: first moment, a tree like the parameters, float32 (float64 for float64 parameters), or in their dtypes.
        nu: second moment, the same.
    """

    count: torch.Tensor
    mu: Any
    nu: Any


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, stored: bool = False) -> Transform:
    r"""Divides the mean of past gradients by the root of the mean of their squares.

        m <- b1 m + (1 - b1) g,    n <- b2 n + (1 - b2) g^2
        u = m / (1 - b1^t) / (sqrt(n / (1 - b2^t)) + eps)

    with t the number of updates, this one included, and eps outside of the root (the paper's algorithm, not
    its "epsilon hat" variant; `torch.optim.AdamW` does the same).

    Args:
        b1, b2: how much of a moment stays.
        eps: added to the root.
        stored: moments are kept in the dtypes of the parameters, rounded when the update has been made of them.
    """

    def init(params: Any) -> ScaleByAdamState:
        return ScaleByAdamState(
            count=torch.zeros((), dtype=torch.int64, device=tree.leaves(params)[0].device),
            mu=tree.map(torch.zeros_like if stored else _zeros, params),
            nu=tree.map(torch.zeros_like if stored else _zeros, params),
        )

    def update(updates: Any, state: ScaleByAdamState, params: Any) -> tuple[Any, ScaleByAdamState]:
        del params
        count = state.count + 1
        gradient = tree.leaves(updates)
        old = [wide(leaf) for leaf in tree.leaves(state.mu)], [wide(leaf) for leaf in tree.leaves(state.nu)]
        mu = torch._foreach_lerp(old[0], gradient, 1 - b1)
        nu = torch._foreach_mul(old[1], b2)
        torch._foreach_addcmul_(nu, gradient, gradient, 1 - b2)
        direction = corrected(mu, nu, bias(b1, count), bias(b2, count), eps)
        return tree.unflatten(updates, direction), ScaleByAdamState(
            count=count, mu=_as_before(state.mu, mu), nu=_as_before(state.nu, nu)
        )

    return Transform(init=init, update=update)


def corrected(mu: Leaves, nu: Leaves, bias_1: torch.Tensor, bias_2: torch.Tensor, eps: float) -> Leaves:
    """The update mu / bias_1 / (sqrt(nu / bias_2) + eps), in the memory of one copy of the moments."""
    result = torch._foreach_sqrt(nu)
    torch._foreach_div_(result, fitting(bias_2.sqrt(), result))
    torch._foreach_add_(result, eps)
    torch._foreach_mul_(result, fitting(bias_1, result))
    torch._foreach_reciprocal_(result)
    torch._foreach_mul_(result, mu)
    return result


def bias(beta: float, count: torch.Tensor) -> torch.Tensor:
    """1 - beta^count, by which a mean that began at 0 is too small, float64 []."""
    return 1 - torch.pow(beta, count.double())


def _as_before(before: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """Moments in the structure and the dtypes of those before."""
    old = tree.leaves(before)
    return tree.unflatten(before, [leaf.to(own.dtype) for leaf, own in zip(leaves, old, strict=True)])


def _zeros(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
