"""The clipped surrogate with one ratio a sequence: GSPO (arXiv 2507.18071)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.calls import checked
from areno_fn.steps.objectives.separable import entropic
from areno_fn.steps.objectives.surrogate import Bounds, Units, counted, surrogate
from areno_fn.steps.reduce import aggregate, divide


@checked
def sequence_clipped(
    low: float = 3e-4,
    high: float = 4e-4,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    importance_cap: float = 0.0,
    entropy_coef: float = 0.0,
) -> Callable[[Actions], Sums]:
    r"""The stage `Actions -> Sums` of GSPO: one term a sequence, whatever its length.

    With s = exp(mean over a sequence of logp - old), not of the sum, and A the mean of its advantages,

        -min(s A, clip(s, 1 - low, 1 + high) A) + kl_coef mean over the sequence of KL(logp, reference)
            - entropy_coef mean over the sequence of H

    averaged over the sequences that have a decision that counts. Bounds are far narrower than those of ratios of
    single decisions, because a mean of many varies little. With an importance cap the first term is weighted by
    min(exp(mean over the sequence of old - rollout), cap), again of the mean: of the sum, long sequences would count
    for nothing.

    Args:
        low: how far the ratio may fall below 1 for a negative advantage.
        high: how far it may rise above 1 for a positive advantage.
        kl_coef: weight of the KL term; 0 leaves it out, and KL is then only reported where a reference is given.
        kl_estimator: a name of `areno_fn.steps.objectives.kl.ESTIMATORS`.
        importance_cap: the largest weight of a sequence, where `Actions.rollout` is given; 0 leaves the weights out.
        entropy_coef: weight of the entropy H, as for `areno_fn.steps.objectives.clipped.clipped`.

    Raises:
        SpecError: there is no such estimator, or a bound is out of range.
    """
    bounds = Bounds(
        low=low,
        high=high,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        importance_cap=importance_cap,
        entropy_coef=entropy_coef,
        who="sequence_clipped",
    )

    def stage(actions: Actions) -> Sums:
        a = counted(actions, bounds)
        return surrogate(a, _sequences(a), bounds)

    return entropic(stage) if entropy_coef else stage


def _sequences(a: Actions) -> Units:
    """Weighted means over every sequence; a sequence that has a decision that counts, counts for 1."""
    weight = a.weight.detach().to(a.logp.dtype)

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(a.documents).index_add(0, a.segments, values)

    sums = total(weight)
    live, number = (sums != 0).to(sums.dtype), torch.arange(a.documents, device=sums.device)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return divide(total(values * weight), sums)

    def reduce(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aggregate(values, live, number, a.documents, "token_mean")

    return Units(of=mean, weight=live, reduce=reduce)
