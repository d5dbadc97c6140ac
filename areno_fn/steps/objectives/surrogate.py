"""What the surrogates of tokens and of sequences have in common: one term a unit, and the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import attrs
import torch

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.record import replace
from areno_fn.steps.objectives.kl import bounded, check_estimator, kl
from areno_fn.steps.reduce import count_of, masked, mean_of, peak_of, spread_of


@attrs.frozen(kw_only=True)
class Bounds:
    """What keeps a surrogate near the policy that drew; see `areno_fn.steps.objectives.clipped.clipped`.

    Attributes:
        low, high: how far the ratio may fall below 1 and rise above it.
        dual: the bound of the dual clip; 0 for none.
        kl_coef, kl_estimator: the KL term.
        importance_cap: the largest importance weight; 0 for no weights.
        entropy_coef: weight of the entropy bonus.
        who: the name of the objective, for messages.
    """

    low: float
    high: float
    kl_coef: float
    kl_estimator: str
    importance_cap: float
    who: str
    dual: float = 0.0
    entropy_coef: float = 0.0

    def __attrs_post_init__(self) -> None:
        check_estimator(self.kl_estimator)
        if not (0 < self.low <= 1 and self.high > 0 and self.kl_coef >= 0):
            raise SpecError(
                f"{self.who} needs 0 < low <= 1, high > 0 and kl_coef >= 0, "
                f"received low={self.low}, high={self.high}, kl_coef={self.kl_coef}"
            )
        if not self.entropy_coef >= 0:
            raise SpecError(f"{self.who} needs entropy_coef >= 0, received {self.entropy_coef}")
        if math.isinf(self.kl_coef) or math.isinf(self.entropy_coef):
            raise SpecError(
                f"{self.who} needs finite coefficients, received kl_coef={self.kl_coef}, entropy_coef={self.entropy_coef}"
            )
        if (self.dual and not self.dual > 1) or not self.importance_cap >= 0:
            raise SpecError(
                f"{self.who} needs dual > 1 and importance_cap > 0, or 0 for none, "
                f"received dual={self.dual}, importance_cap={self.importance_cap}"
            )


class Units(NamedTuple):
    """What a term stands for: a decision, or a sequence of them. Made inside a stage, so of a kind that compiles.

    Attributes:
        of: from numbers per decision to numbers per unit.
        weight: what each unit counts for, 0 where it does not.
        reduce: from numbers per unit to a numerator and a denominator.
    """

    of: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor
    reduce: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def surrogate(a: Actions, units: Units, bounds: Bounds) -> Sums:
    """The clipped loss of every unit, its KL term and its entropy bonus, reduced, with statistics.

    Args:
        a: what `counted` returned.
        units: how decisions are pooled and reduced.
        bounds: the numbers of the loss.
    """
    ratio, advantage = bounded(units.of(a.logp - a.old)).exp(), units.of(a.advantage)
    importance = bounded(units.of(_against_rollout(a))).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantage)
    if bounds.dual:
        gain = torch.where(advantage < 0, torch.maximum(gain, bounds.dual * advantage), gain)
    if bounds.importance_cap:
        gain = gain * importance.clamp(max=bounds.importance_cap)
    policy, weight = units.reduce(-gain)
    total, stats = policy, {"policy_loss": torch.stack([policy.detach(), weight])}
    if a.reference is not None:
        divergence = kl(a.logp, a.reference, bounds.kl_estimator)
        stats["kl"] = mean_of(divergence, a.weight)
        if bounds.kl_coef:
            total = policy + bounds.kl_coef * units.reduce(units.of(divergence))[0]
    if bounds.entropy_coef:
        total = total - bounds.entropy_coef * units.reduce(units.of(a.entropy))[0]
    below = (ratio < 1 - bounds.low) & (advantage < 0)
    above = (ratio > 1 + bounds.high) & (advantage > 0)
    distance = (a.logp - _recorded(a)).abs()
    stats |= {
        "entropy": mean_of(a.entropy, a.weight),
        "ratio_mean": mean_of(ratio, units.weight),
        "ratio_std": spread_of(ratio, units.weight, around=1.0),
        "clip_fraction": mean_of((below | above).float(), units.weight),
        "clip_fraction_low": mean_of(below.float(), units.weight),
        "importance_mean": mean_of(importance, units.weight),
        "logp_diff_mean": mean_of(distance, a.weight),
        "tokens": count_of(a.weight),
    }
    peaks = {
        "ratio_max": peak_of(ratio, units.weight),
        "importance_max": peak_of(importance, units.weight),
        "logp_diff_max": peak_of(distance, a.weight),
    }
    return Sums(total=total, weight=weight, stats=stats, peaks=peaks)


def counted(actions: Actions, bounds: Bounds) -> Actions:
    """The actions with 0 in place of every number that does not count.

    Raises:
        RecordError: data carries a gradient, or the KL or the importance weights lack what they compare with.
    """
    _check_data(actions, bounds)
    fields = ("logp", "old", "advantage", "entropy", "reference", "rollout")
    present = {name: getattr(actions, name) for name in fields if getattr(actions, name) is not None}
    return replace(actions, **{name: masked(value, actions.weight) for name, value in present.items()})


def _recorded(a: Actions) -> torch.Tensor:
    """The log-probabilities that the rollout recorded."""
    return a.old if a.rollout is None else a.rollout


def _against_rollout(a: Actions) -> torch.Tensor:
    """How far training is from the rollout in log-probability: that of the parameters that drew, where it was computed again."""
    return (a.logp.detach() if a.rollout is None else a.old) - _recorded(a)


def _check_data(actions: Actions, bounds: Bounds) -> None:
    for name in ("old", "advantage", "reference", "rollout"):
        value = getattr(actions, name)
        if value is not None and value.requires_grad:
            raise RecordError(
                f"Actions.{name} carries a gradient; it is data recorded before the update, "
                f"never a function of the current parameters"
            )
    if bounds.kl_coef and actions.reference is None:
        raise RecordError(
            f"{bounds.who} has kl_coef={bounds.kl_coef}, but the Actions carry no reference; "
            f"put reference log-probabilities into the Experience or set kl_coef to 0"
        )
    if bounds.importance_cap and actions.rollout is None:
        raise RecordError(
            f"{bounds.who} has importance_cap={bounds.importance_cap}, but the Actions carry no rollout log-probabilities "
            f"beside old; give `old` to experience() or set importance_cap to 0"
        )
