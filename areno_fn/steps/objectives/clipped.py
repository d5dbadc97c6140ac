"""The clipped surrogate of PPO (arXiv 1707.06347), as GRPO (2402.03300) and DAPO (2503.14476) use it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.record import replace
from areno_fn.steps.objectives.kl import bounded, check_estimator, kl
from areno_fn.steps.reduce import aggregate, check_aggregation, count_of, masked, mean_of, peak_of, spread_of


def clipped(
    low: float = 0.2,
    high: float = 0.2,
    *,
    aggregation: str = "token_mean",
    constant: float | None = None,
    dual: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    importance_cap: float = 0.0,
) -> Callable[[Actions], Sums]:
    r"""The stage `Actions -> Sums` of the clipped policy-gradient loss.

    Per decision, with r = exp(logp - old) and A the advantage,

        -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL(logp, reference)

    reduced by `aggregation`. The KL term is added: it is minimised with the loss. `old` is data recorded by
    the behaviour policy; against a copy of the current log-probability r would always be 1 and never clip.
    Where the clip binds, the gradient of the first term is exactly 0.

    With a dual clip (arXiv 1912.09729) the first term is at most -dual A where A < 0, so that a ratio far above 1
    cannot make one bad decision count without bound. With an importance cap the first term is weighted by
    min(exp(old - rollout), cap), data that correct for rollouts drawn by other arithmetic than that which trains.

    Args:
        low: how far the ratio may fall below 1 for a negative advantage.
        high: how far it may rise above 1 for a positive advantage (0.28 for "clip higher").
        aggregation: a name of `areno_fn.steps.reduce.aggregate`.
        constant: the length that "constant_length" divides by.
        dual: the bound of the dual clip, above 1; 0 leaves it out.
        kl_coef: weight of the KL term; 0 leaves it out, and KL is then only reported where a reference is given.
        kl_estimator: a name of `areno_fn.steps.objectives.kl.ESTIMATORS`.
        importance_cap: the largest weight of a decision, where `Actions.rollout` is given; 0 leaves the weights out.

    Raises:
        SpecError: there is no such aggregation or estimator, or a bound is out of range.
    """
    check_aggregation(aggregation, constant)
    check_estimator(kl_estimator)
    if not (0 < low <= 1 and high > 0 and kl_coef >= 0):
        raise SpecError(
            f"clipped needs 0 < low <= 1, high > 0 and kl_coef >= 0, received low={low}, high={high}, kl_coef={kl_coef}"
        )

    if (dual and not dual > 1) or importance_cap < 0:
        raise SpecError(
            f"clipped needs dual > 1 and importance_cap > 0, or 0 for none, received dual={dual}, importance_cap={importance_cap}"
        )

    def stage(actions: Actions) -> Sums:
        check_data(actions, kl_coef, "clipped")
        a = masked_actions(actions)

        def reduced(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return aggregate(values, a.weight, a.segments, a.documents, aggregation, constant)

        ratio = bounded(a.logp - a.old).exp()
        gain = torch.minimum(ratio * a.advantage, ratio.clamp(1 - low, 1 + high) * a.advantage)
        if dual:
            gain = torch.where(a.advantage < 0, torch.maximum(gain, dual * a.advantage), gain)
        if importance_cap:
            gain = gain * _correction(a, importance_cap)
        policy, weight = reduced(-gain)
        total, stats = policy, {"policy_loss": torch.stack([policy.detach(), weight])}
        if a.reference is not None:
            divergence = kl(a.logp, a.reference, kl_estimator)
            stats["kl"] = mean_of(divergence, a.weight)
            if kl_coef:
                total = policy + kl_coef * reduced(divergence)[0]
        distance = (a.logp - (a.old if a.rollout is None else a.rollout)).abs()
        peaks = {"ratio_max": peak_of(ratio, a.weight), "logp_diff_max": peak_of(distance, a.weight)}
        return Sums(total=total, weight=weight, stats=stats | _stats(a, ratio, distance, low, high), peaks=peaks)

    return stage


def _stats(a: Actions, ratio: torch.Tensor, distance: torch.Tensor, low: float, high: float) -> dict[str, torch.Tensor]:
    below = (ratio < 1 - low) & (a.advantage < 0)
    above = (ratio > 1 + high) & (a.advantage > 0)
    return {
        "entropy": mean_of(a.entropy, a.weight),
        "ratio_mean": mean_of(ratio, a.weight),
        "ratio_std": spread_of(ratio, a.weight, around=1.0),
        "clip_fraction": mean_of((below | above).float(), a.weight),
        "clip_fraction_low": mean_of(below.float(), a.weight),
        "logp_diff_mean": mean_of(distance, a.weight),
        "tokens": count_of(a.weight),
    }


def masked_actions(actions: Actions) -> Actions:
    """The actions with 0 in place of every number that does not count."""
    fields = ("logp", "old", "advantage", "entropy", "reference", "rollout")
    present = {name: getattr(actions, name) for name in fields if getattr(actions, name) is not None}
    return replace(actions, **{name: masked(value, actions.weight) for name, value in present.items()})


def _correction(a: Actions, cap: float) -> torch.Tensor:
    """The truncated importance weight of every decision, data."""
    if a.rollout is None:
        raise RecordError(
            f"clipped has importance_cap={cap}, but the Actions carry no rollout log-probabilities beside old; "
            f"give `old` to experience() or set importance_cap to 0"
        )
    return bounded(a.old - a.rollout).exp().clamp(max=cap)


def check_data(actions: Actions, kl_coef: float, who: str) -> None:
    """Refuses data with a gradient, and a KL without a reference.

    Raises:
        RecordError: says which field, and what would be right.
    """
    for name in ("old", "advantage", "reference", "rollout"):
        value = getattr(actions, name)
        if value is not None and value.requires_grad:
            raise RecordError(
                f"Actions.{name} carries a gradient; it is data recorded before the update, "
                f"never a function of the current parameters"
            )
    if kl_coef and actions.reference is None:
        raise RecordError(
            f"{who} has kl_coef={kl_coef}, but the Actions carry no reference; "
            f"put reference log-probabilities into the Experience or set kl_coef to 0"
        )
