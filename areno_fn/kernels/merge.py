"""An adapted weight as one matrix, and back: the arithmetic that `linear` does not do."""

from __future__ import annotations

import torch

from areno_fn.contracts.adapter import Adapted


def merged(adapted: Adapted, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`weight + b a`, [E, D], computed in float32 (float64 where an operand is) and rounded once, to `dtype`.

    Args:
        adapted: the weight and its change.
        dtype: of the result; that of the weight when omitted.
    """
    change = _change(adapted, adapted.weight)
    return (adapted.weight.to(change.dtype) + change).to(dtype or adapted.weight.dtype)


def unmerged(weight: torch.Tensor, adapted: Adapted, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`weight - b a`, [E, D]: what `merged` was made from, up to its roundings.

    Where sums and products are exact, as of small integers, the weight comes back bit for bit. Otherwise an element
    is off by at most a unit in the last place of the merged one, in the dtype it was rounded to, and one of its own.

    Args:
        weight: what `merged` returned.
        adapted: the change; its own weight is not read.
        dtype: of the result; that of `adapted.weight` when omitted.
    """
    change = _change(adapted, weight)
    return (weight.to(change.dtype) - change).to(dtype or adapted.weight.dtype)


def _change(adapted: Adapted, weight: torch.Tensor) -> torch.Tensor:
    """`b a`; a sum of its own, not added up in the weight, so that both directions move by the same numbers."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, adapted.a.dtype), torch.float32)
    return adapted.b.to(wide) @ adapted.a.to(wide)
