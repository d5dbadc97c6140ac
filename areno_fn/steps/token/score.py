"""Scoring: the log-probabilities of given tokens under given parameters, as stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from areno_fn.contracts.actions import Actions, Comparisons, Scores, Sums
from areno_fn.contracts.batch import Experience, PackedTokens, Pairs
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.checks import require_token_policy
from areno_fn.steps.token.head import decision_log_probs
from areno_fn.steps.token.levered import levered
from areno_fn.steps.token.sampling import check_sampling

Stage = TypeVar("Stage", bound=Callable[..., Any])


@checked
def score(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, PackedTokens], Scores]:
    """A stage `(params, PackedTokens) -> Scores`.

    Args:
        policy: the model.
        sampling: the distribution to score under. Supervised training uses `Sampling()`, the model's own
            distribution; what was sampled is scored under what it was sampled from.

    Raises:
        SpecError: the distribution is none, or the policy no `TokenPolicy`.
    """
    require_token_policy(policy, "hidden", "logits")
    check_sampling(sampling)

    def made(batch: PackedTokens, logp: torch.Tensor, entropy: torch.Tensor) -> Scores:
        return Scores(**_fields(batch, logp, entropy))

    def stage(params: Any, batch: PackedTokens) -> Scores:
        return made(batch, *_scored(policy, sampling, params, batch))

    return _with_losses(stage, policy, sampling, lambda batch: batch, made)


@checked
def act(policy: TokenPolicy, sampling: Sampling, *, entropic: bool = False) -> Callable[[Any, Experience], Actions]:
    """A stage `(params, Experience) -> Actions`: what `score` gives, beside what was recorded of the decisions.

    Args:
        policy, sampling: as for `score`.
        entropic: entropies carry a gradient, as a loss with an entropy bonus asks for; else they are statistics.
    """
    require_token_policy(policy, "hidden", "logits")
    check_sampling(sampling)

    def made(batch: Experience, logp: torch.Tensor, entropy: torch.Tensor) -> Actions:
        return Actions(
            **_fields(batch.packed, logp, entropy),
            old=batch.old,
            advantage=batch.advantage,
            reference=batch.reference,
            rollout=batch.rollout,
        )

    def stage(params: Any, batch: Experience) -> Actions:
        return made(batch, *_scored(policy, sampling, params, batch.packed, entropic=entropic))

    setattr(stage, "entropic", entropic)
    return _with_losses(stage, policy, sampling, lambda batch: batch.packed, made, entropic=entropic)


@checked
def compare(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, Pairs], Comparisons]:
    """A stage `(params, Pairs) -> Comparisons`: what `score` gives, beside the reference's log-probabilities."""
    require_token_policy(policy, "hidden", "logits")
    check_sampling(sampling)

    def stage(params: Any, batch: Pairs) -> Comparisons:
        logp, entropy = _scored(policy, sampling, params, batch.packed)
        return Comparisons(**_fields(batch.packed, logp, entropy), reference=batch.reference)

    return stage


@checked
def reference_logp(policy: TokenPolicy, sampling: Sampling) -> Callable[[Any, PackedTokens], torch.Tensor]:
    """A function `(params, PackedTokens) -> logp` [M] without a gradient, for parameters that are not trained."""
    require_token_policy(policy, "hidden", "logits")
    check_sampling(sampling)

    def stage(params: Any, batch: PackedTokens) -> torch.Tensor:
        with torch.no_grad():
            return _scored(policy, sampling, params, batch)[0]

    return stage


def _fields(batch: PackedTokens, logp: torch.Tensor, entropy: torch.Tensor) -> dict[str, Any]:
    """The fields of `Scores`, which the records of other stages have too."""
    return {
        "logp": logp,
        "entropy": entropy,
        "weight": batch.weight,
        "segments": batch.segments[batch.index],
        "documents": batch.documents,
    }


def _scored(
    policy: TokenPolicy, sampling: Sampling, params: Any, batch: PackedTokens, *, entropic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = _hidden(policy, params, batch)
    return decision_log_probs(policy, sampling, params, hidden, batch.targets, batch.kept, entropic=entropic)


def _hidden(policy: TokenPolicy, params: Any, batch: PackedTokens) -> torch.Tensor:
    """The states [M, D] that decisions are made in."""
    bounds = (batch.documents, batch.longest)
    hidden = policy.hidden(params, batch.tokens, batch.positions, batch.segments, bounds=bounds)
    if hidden.ndim != 2 or hidden.shape[0] != batch.tokens.shape[0]:
        raise ModelError(
            f"hidden of the policy {type(policy).__name__} gave {list(hidden.shape)} for {batch.tokens.shape[0]} tokens; "
            f"it must be [{batch.tokens.shape[0]}, D]"
        )
    return hidden[batch.index]


def _with_losses(
    stage: Stage,
    policy: TokenPolicy,
    sampling: Sampling,
    packed: Callable[[Any], PackedTokens],
    made: Callable[..., Any],
    *,
    entropic: bool = False,
) -> Stage:
    """The stage, which offers to be run together with a separable loss (`areno_fn.steps.compose.pipeline`)."""

    def with_loss(loss: Callable[[Any], Sums]) -> Callable[[Any, Any], Sums]:
        def run(params: Any, batch: Any) -> Sums:
            tokens = packed(batch)
            hidden = _hidden(policy, params, tokens)
            record = partial(made, batch)
            return levered(
                policy, sampling, params, hidden, tokens.targets, tokens.kept, record, loss, entropic=entropic
            )

        return run

    setattr(stage, "with_loss", with_loss)
    return stage
