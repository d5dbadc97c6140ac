"""The clipped surrogate of PPO (arXiv 1707.06347), as GRPO (2402.03300) and DAPO (2503.14476) use it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.calls import checked
from areno_fn.steps.objectives.separable import entropic, separable
from areno_fn.steps.objectives.surrogate import Bounds, Units, counted, surrogate
from areno_fn.steps.reduce import aggregate, check_aggregation


@checked
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
    entropy_coef: float = 0.0,
) -> Callable[[Actions], Sums]:
    r"""The stage `Actions -> Sums` of the clipped policy-gradient loss.

    Per decision, with r = exp(logp - old) and A the advantage,

        -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL(logp, reference) - entropy_coef H

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
        entropy_coef: weight of the entropy H of the distribution a decision was scored under, which is maximised (arXiv
            1602.01783); above 0 the entropies must carry a gradient: `act(policy, sampling, entropic=True)`.

    Raises:
        SpecError: there is no such aggregation or estimator, or a bound is out of range.
    """
    check_aggregation(aggregation, constant)
    bounds = Bounds(
        low=low,
        high=high,
        dual=dual,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        importance_cap=importance_cap,
        entropy_coef=entropy_coef,
        who="clipped",
    )

    def stage(actions: Actions) -> Sums:
        a = counted(actions, bounds)

        def reduce(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return aggregate(values, a.weight, a.segments, a.documents, aggregation, constant)

        return surrogate(a, Units(of=_itself, weight=a.weight, reduce=reduce), bounds)

    return separable(entropic(stage) if entropy_coef else stage)


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values
