"""`linear`: the affine map whose rows do not depend on how many there are, of a weight that may be adapted."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.nn.functional as F

from areno_fn.contracts.adapter import Adapted, Weight

FEW = 4
"""On the CPU a product of fewer rows is another routine, which adds up in another order."""
EVEN = 8
"""Some BLAS multiply by fewer columns than that with yet another routine, and tensor cores take them by eights."""
_DEALT = 64
"""Up to so many rows, a number that is not a multiple of `FEW` may leave fewer than that to one of the threads."""


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`y = x weight^T + bias`, a row of which has the same bits alone as among others.

    A rollout multiplies one row per sequence where training multiplies one per token, so their log-probabilities
    can only be equal if rows are. On the CPU a few zero rows see to it. On the GPU this is `F.linear`, whose
    result does depend on the number of rows, by roundings.

    An adapted weight is never merged: `y = x weight^T + bias + (x a^T) b^T`, with a and b in the dtype of x.

    Args:
        x: [..., D], floating.
        weight: [E, D].
        bias: [E] or None.

    Returns:
        [..., E].
    """
    if isinstance(weight, Adapted):
        a, b = filled(weight.a.to(x.dtype), weight.b.to(x.dtype))
        return _product(x, weight.weight, bias) + _product(_product(x, a), b)
    return _product(x, weight, bias)


def linear_into_input(dy: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The cotangent [N, D] of `linear`'s rows x, of the cotangent dy [N, E] of its result."""
    if isinstance(weight, Adapted):
        return dy @ weight.weight + (dy @ weight.b.to(dy.dtype)) @ weight.a.to(dy.dtype)
    return dy @ weight


def linear_into_weights(
    dy: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """The cotangents of what `linear` multiplies by, of dy [N, E] and the rows x [N, D]; those alone that are wanted.

    Args:
        dy: the cotangent of the result.
        x: the rows.
        weight, bias: as `linear` took them.
        wanted: some of "weight", "bias" and, of an adapted weight, "a" and "b".

    Returns:
        By the names in `wanted`, each in the dtype of what it is the cotangent of.
    """
    found: dict[str, torch.Tensor] = {}
    base = weight.weight if isinstance(weight, Adapted) else weight
    if "weight" in wanted:
        found["weight"] = (dy.t() @ x).to(base.dtype)
    if "bias" in wanted and bias is not None:
        found["bias"] = dy.sum(0).to(bias.dtype)
    if isinstance(weight, Adapted):
        if "a" in wanted:
            found["a"] = ((dy @ weight.b.to(dy.dtype)).t() @ x).to(weight.a.dtype)
        if "b" in wanted:
            found["b"] = (dy.t() @ (x @ weight.a.to(x.dtype).t())).to(weight.b.dtype)
    return found


def filled(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product b a, of a rank that is a multiple of `EVEN`: zero rows below a, zero columns beside b."""
    missing = -a.shape[0] % EVEN
    return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = math.prod(x.shape[:-1])
    missing = -rows % FEW
    dealt = rows > _DEALT and weight.shape[0] > 1  # a weight of a single row is multiplied by another routine still
    if not missing or dealt or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    whole = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, missing))
    return F.linear(whole, weight, bias)[:rows].reshape(*x.shape[:-1], weight.shape[0])
