"""Scoring: the log-probabilities of given tokens under given parameters, as stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn.contracts.actions import Actions, Comparisons, Scores
from areno_fn.contracts.batch import Experience, PackedTokens, Pairs
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.head import decision_log_probs
from areno_fn.steps.token.sampling import check_sampling


def score(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, PackedTokens], Scores]:
    """A stage `(params, PackedTokens) -> Scores`.

    Args:
        policy: the model.
        sampling: the distribution to score under. Supervised training uses `Sampling()`, the model's own
            distribution; what was sampled is scored under what it was sampled from.

    Raises:
        SpecError: the distribution is none.
    """
    check_sampling(sampling)

    def stage(params: Any, batch: PackedTokens) -> Scores:
        return Scores(**_of_decisions(policy, sampling, params, batch))

    return stage


def act(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, Experience], Actions]:
    """A stage `(params, Experience) -> Actions`: what `score` gives, beside what was recorded of the decisions."""
    check_sampling(sampling)

    def stage(params: Any, batch: Experience) -> Actions:
        return Actions(
            **_of_decisions(policy, sampling, params, batch.packed),
            old=batch.old,
            advantage=batch.advantage,
            reference=batch.reference,
            rollout=batch.rollout,
        )

    return stage


def compare(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, Pairs], Comparisons]:
    """A stage `(params, Pairs) -> Comparisons`: what `score` gives, beside the reference's log-probabilities."""
    check_sampling(sampling)

    def stage(params: Any, batch: Pairs) -> Comparisons:
        return Comparisons(**_of_decisions(policy, sampling, params, batch.packed), reference=batch.reference)

    return stage


def reference_logp(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, PackedTokens], torch.Tensor]:
    """A function `(params, PackedTokens) -> logp` [M] without a gradient, for parameters that are not trained."""
    check_sampling(sampling)

    def stage(params: Any, batch: PackedTokens) -> torch.Tensor:
        with torch.no_grad():
            return _scored(policy, sampling, params, batch)[0]

    return stage


def _of_decisions(policy: TokenPolicy, sampling: Sampling, params: Any, batch: PackedTokens) -> dict[str, Any]:
    """The fields of `Scores`, which the records of other stages have too."""
    logp, entropy = _scored(policy, sampling, params, batch)
    return {
        "logp": logp,
        "entropy": entropy,
        "weight": batch.weight,
        "segments": batch.segments[batch.index],
        "documents": batch.documents,
    }


def _scored(
    policy: TokenPolicy, sampling: Sampling, params: Any, batch: PackedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    bounds = (batch.documents, batch.longest)
    hidden = policy.hidden(params, batch.tokens, batch.positions, batch.segments, bounds=bounds)
    return decision_log_probs(policy, sampling, params, hidden[batch.index], batch.targets, batch.kept)
