"""`linear`: the affine map whose rows do not depend on how many there are, of a weight that may be adapted."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from areno_fn.contracts.adapter import Adapted, LowRank, Weight

FEW = 4
"""On the CPU a product of fewer rows is another routine, which adds up in another order."""
_DEALT = 64
"""Up to so many rows, a number that is not a multiple of `FEW` may leave fewer than that to one of the threads."""


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`y = x weight^T + bias`, a row of which has the same bits alone as among others.

    A rollout multiplies one row per sequence where training multiplies one per token, so their log-probabilities
    can only be equal if rows are. On the CPU a few zero rows see to it. On the GPU this is `F.linear`, whose
    result does depend on the number of rows, by roundings.

    An adapted weight is never merged: `y = x W^T + bias + (scale x A^T) B^T`, with A and B in the dtype of x.

    Args:
        x: [..., D], floating.
        weight: [E, D].
        bias: [E] or None.

    Returns:
        [..., E].
    """
    if isinstance(weight, Adapted):
        return _product(x, weight.weight, bias) + _changes(x, weight)
    return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    missing = -rows % FEW
    if not missing or rows > _DEALT or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    whole = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, missing))
    return F.linear(whole, weight, bias)[:rows].reshape(*x.shape[:-1], weight.shape[0])


def _changes(x: torch.Tensor, weight: Adapted) -> torch.Tensor:
    """What the parts add, [..., E]; 0 in rows of the weight that none of them changes."""
    pieces, done = [], 0
    for part, start in zip(weight.parts, weight.starts, strict=True):
        if start > done:
            pieces.append(_nothing(x, start - done))
        pieces.append(_change(x, part))
        done = start + part.b.shape[0]
    if weight.weight.shape[0] > done:
        pieces.append(_nothing(x, weight.weight.shape[0] - done))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def _change(x: torch.Tensor, part: LowRank) -> torch.Tensor:
    return _product(_product(x, part.a.to(x.dtype)) * part.scale, part.b.to(x.dtype))


def _nothing(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_zeros(()).expand(*x.shape[:-1], rows)
