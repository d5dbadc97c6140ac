"""An adapted weight as one matrix, and back: the arithmetic that `linear` does not do."""

from __future__ import annotations

import torch

from areno_fn.contracts.adapter import Adapted


def merged(adapted: Adapted, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`W + scale B A` in the rows of each part, [E, D].

    Computed in float32 (float64 where the weight or a part is) and rounded once, to `dtype`.

    Args:
        adapted: the weight and its parts.
        dtype: of the result; that of the weight when omitted.
    """
    return _moved(adapted.weight, adapted, 1.0).to(dtype or adapted.weight.dtype)


def unmerged(weight: torch.Tensor, adapted: Adapted, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`weight - scale B A` in the rows of each part, [E, D]: what `merged` was made from, up to its roundings.

    Where sums and products are exact, as of small integers, the weight comes back bit for bit. Otherwise an element
    is off by at most a unit in the last place of the merged one, in the dtype it was rounded to, and one of its own.

    Args:
        weight: what `merged` returned.
        adapted: the parts; its own weight is not read.
        dtype: of the result; that of `adapted.weight` when omitted.
    """
    return _moved(weight, adapted, -1.0).to(dtype or adapted.weight.dtype)


def _moved(weight: torch.Tensor, adapted: Adapted, sign: float) -> torch.Tensor:
    wide = torch.float32
    for leaf in (weight, *(part.a for part in adapted.parts)):
        wide = torch.promote_types(wide, leaf.dtype)
    result = weight.to(wide, copy=True)
    for part, start in zip(adapted.parts, adapted.starts, strict=True):
        change = part.b.to(wide) @ part.a.to(wide)
        result[start : start + part.b.shape[0]] += change * (sign * part.scale)
    return result
