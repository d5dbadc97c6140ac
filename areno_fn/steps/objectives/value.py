"""The clipped value loss of PPO (arXiv 1707.06347), for a critic that estimates returns."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Estimates, Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.steps.reduce import aggregate, check_aggregation, count_of, masked, mean_of


@checked
def value_clipped(
    clip: float = 0.5, *, coef: float = 0.5, aggregation: str = "token_mean", constant: float | None = None
) -> Callable[[Estimates], Sums]:
    r"""The stage `Estimates -> Sums` of the squared error of values that may not move far.

        coef 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    Where the clipped error is the larger one, V has left the surroundings of V_old and the gradient is exactly 0.

    Args:
        clip: how far a value may move from what it was.
        coef: weight of the loss.
        aggregation: a name of `areno_fn.steps.reduce.aggregate`.
        constant: the length that "constant_length" divides by.

    Raises:
        SpecError: there is no such aggregation, or a number is not above 0.
    """
    check_aggregation(aggregation, constant)
    if not (clip > 0 and 0 < coef < math.inf):
        raise SpecError(f"value_clipped needs clip > 0 and a finite coef > 0, received clip={clip}, coef={coef}")

    def stage(estimates: Estimates) -> Sums:
        e = estimates
        for name in ("old", "returns"):
            if getattr(e, name).requires_grad:
                raise RecordError(f"Estimates.{name} carries a gradient; it is data recorded before the update")
        value, old, returns = (masked(x, e.weight) for x in (e.value, e.old, e.returns))
        near = torch.minimum(torch.maximum(value, old - clip), old + clip)
        free, held = (value - returns).square(), (near - returns).square()
        # a NaN is larger than nothing: what was recorded as one must show
        errors = 0.5 * coef * torch.where((held > free) | held.isnan(), held, free)
        total, weight = aggregate(errors, e.weight, e.segments, e.documents, aggregation, constant)
        stats = {"clip_fraction": mean_of((held > free).to(errors.dtype), e.weight), "tokens": count_of(e.weight)}
        return Sums(total=total, weight=weight, stats=stats, peaks={})

    return stage
