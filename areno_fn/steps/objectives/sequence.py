"""The clipped surrogate with one ratio a sequence: GSPO (arXiv 2507.18071)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.errors import SpecError
from areno_fn.steps.objectives.clipped import check_data, masked_actions
from areno_fn.steps.objectives.kl import bounded, check_estimator, kl
from areno_fn.steps.reduce import aggregate, count_of, divide, mean_of, peak_of, spread_of


def sequence_clipped(
    low: float = 3e-4, high: float = 4e-4, *, kl_coef: float = 0.0, kl_estimator: str = "k3"
) -> Callable[[Actions], Sums]:
    r"""The stage `Actions -> Sums` of GSPO: one term a sequence, whatever its length.

    With s = exp(mean over a sequence of logp - old), not of the sum, and A the mean of its advantages,

        -min(s A, clip(s, 1 - low, 1 + high) A) + kl_coef mean over the sequence of KL(logp, reference)

    averaged over the sequences that have a decision that counts. Bounds are far narrower than those of ratios of
    single decisions, because a mean of many varies little.

    Args:
        low: how far the ratio may fall below 1 for a negative advantage.
        high: how far it may rise above 1 for a positive advantage.
        kl_coef: weight of the KL term; 0 leaves it out, and KL is then only reported where a reference is given.
        kl_estimator: a name of `areno_fn.steps.objectives.kl.ESTIMATORS`.

    Raises:
        SpecError: there is no such estimator, or a bound is out of range.
    """
    check_estimator(kl_estimator)
    if not (0 < low <= 1 and high > 0 and kl_coef >= 0):
        raise SpecError(
            f"sequence_clipped needs 0 < low <= 1, high > 0 and kl_coef >= 0, "
            f"received low={low}, high={high}, kl_coef={kl_coef}"
        )

    def stage(actions: Actions) -> Sums:
        check_data(actions, kl_coef, "sequence_clipped")
        a = masked_actions(actions)
        mean, live = _sequence_means(a)
        ratio, advantage = bounded(mean(a.logp - a.old)).exp(), mean(a.advantage)
        number = torch.arange(a.documents, device=live.device)

        def reduced(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return aggregate(values, live, number, a.documents, "token_mean")

        policy, weight = reduced(-torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
        total, stats = policy, {"policy_loss": torch.stack([policy.detach(), weight])}
        if a.reference is not None:
            divergence = kl(a.logp, a.reference, kl_estimator)
            stats["kl"] = mean_of(divergence, a.weight)
            if kl_coef:
                total = policy + kl_coef * reduced(mean(divergence))[0]
        below, above = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
        distance = (a.logp - (a.old if a.rollout is None else a.rollout)).abs()
        stats |= {
            "entropy": mean_of(a.entropy, a.weight),
            "ratio_mean": mean_of(ratio, live),
            "ratio_std": spread_of(ratio, live, around=1.0),
            "clip_fraction": mean_of((below | above).float(), live),
            "clip_fraction_low": mean_of(below.float(), live),
            "logp_diff_mean": mean_of(distance, a.weight),
            "tokens": count_of(a.weight),
        }
        peaks = {"ratio_max": peak_of(ratio, live), "logp_diff_max": peak_of(distance, a.weight)}
        return Sums(total=total, weight=weight, stats=stats, peaks=peaks)

    return stage


def _sequence_means(a: Actions) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """A function from numbers per decision to their weighted means per sequence, and 1 for a sequence that counts."""
    weight = a.weight.detach().to(a.logp.dtype)

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(a.documents).index_add(0, a.segments, values)

    sums = total(weight)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return divide(total(values * weight), sums)

    return mean, (sums != 0).to(sums.dtype)
