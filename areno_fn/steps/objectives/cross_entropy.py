"""Supervised fine-tuning: the negative log-likelihood of the tokens that count."""

from __future__ import annotations

from collections.abc import Callable

from areno_fn.contracts.actions import Scores, Sums
from areno_fn.contracts.calls import checked
from areno_fn.steps.objectives.separable import separable
from areno_fn.steps.reduce import aggregate, check_aggregation, count_of, masked, mean_of


@checked
def cross_entropy(aggregation: str = "token_mean", constant: float | None = None) -> Callable[[Scores], Sums]:
    """The stage `Scores -> Sums` of -logp: with "token_mean", -sum(w logp) / sum(w).

    Args:
        aggregation: a name of `areno_fn.steps.reduce.aggregate`.
        constant: the length that "constant_length" divides by.

    Raises:
        SpecError: there is no such aggregation.
    """
    check_aggregation(aggregation, constant)

    def stage(scores: Scores) -> Sums:
        logp = masked(scores.logp, scores.weight)
        total, weight = aggregate(-logp, scores.weight, scores.segments, scores.documents, aggregation, constant)
        stats = {"entropy": mean_of(scores.entropy, scores.weight), "tokens": count_of(scores.weight)}
        return Sums(total=total, weight=weight, stats=stats, peaks={})

    return separable(stage)
