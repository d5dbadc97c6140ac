"""Algorithms that compare the samples of a prompt with each other: GRPO, GSPO, and what their options make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout, Prompts, Rollout
from areno_fn.contracts.execution import CycleUnit
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GRPO, GSPO, PPO, Grouped, Repeated, Sampled
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import Compare, compared
from areno_fn.steps.compose import pipeline
from areno_fn.steps.joins import Stage
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.kl import kl
from areno_fn.steps.objectives.separable import is_entropic
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.recipes.algorithm import (
    ACTOR,
    NO_LOSSES,
    Algorithm,
    Materials,
    Update,
    beginning,
    moving,
    rollout_key,
    start_of,
)
from areno_fn.steps.returns import gae, terminal_rewards, whiten
from areno_fn.steps.token.experience import completion_kl, drawn_places, experience, minibatches, over_completions
from areno_fn.steps.token.report import describe, mean_metrics
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, reference_logp


def grpo(spec: GRPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300, with the choices of DAPO as options).

    Every iteration draws `samples` completions a prompt, takes the reward's deviation from a baseline as the
    advantage of all tokens of a completion, and minimises the clipped surrogate against the log-probabilities
    recorded while sampling.

    Args:
        losses: for the actor, a stage `Actions -> Sums` instead of the clipped surrogate.
    """
    return _policy_gradient(spec, materials, losses.get(ACTOR) or surrogate_of(spec))


def gspo(spec: GSPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Group sequence policy optimization (arXiv 2507.18071): as `grpo`, with one ratio and one term a completion.

    Args:
        losses: for the actor, a stage `Actions -> Sums` instead of the surrogate.
    """
    surrogate = sequence_clipped(
        low=spec.clip_low,
        high=spec.clip_high,
        kl_coef=kl_of_loss(spec),
        kl_estimator=spec.kl_estimator,
        importance_cap=spec.importance_cap,
        entropy_coef=spec.entropy_coef,
    )
    return _policy_gradient(spec, materials, losses.get(ACTOR) or surrogate)


def _policy_gradient(spec: GRPO | GSPO, materials: Materials, loss: Stage) -> Algorithm:
    """Draw, judge, compare, and make `epochs` x `minibatches` updates.

    To correct for the rollout, log-probabilities under the parameters that drew are computed again, as training does.
    """
    scoring = act(materials.token_policy, spec.sampling, entropic=is_entropic(loss))
    update = moving(pipeline(scoring, loss), materials)
    recall = recalling(spec, materials)

    def step(state: TrainState, batch: JudgedRollout) -> tuple[TrainState, Metrics]:
        batch = recall(state, batch)
        advantages = _advantages(spec, batch, materials.compare)
        state, metrics = updated(update, spec, materials, state, batch, advantages)
        return iterated(state), metrics | describe(batch, advantages) | kl_told(spec, batch, spec.kl_coef)

    begin = beginning(materials, keep_reference=spec.kl_coef > 0)
    return Algorithm(begin=begin, sample=sampling_of(spec, materials), step=step, recall=recall)


def updated(
    update: Update,
    spec: GRPO | GSPO | PPO,
    materials: Materials,
    state: TrainState,
    batch: JudgedRollout,
    advantages: torch.Tensor,
    returns: torch.Tensor | None = None,
) -> tuple[TrainState, Metrics]:
    """The state after `epochs` x `minibatches` updates over one rollout, of which all that was recorded stays as it is."""
    reported = []
    for rows in updates_of(spec, state, batch.rewards.shape[0]):
        micro = experience(
            batch.rollout,
            advantages,
            rows=rows,
            micro_tokens=materials.micro_tokens,
            mask_truncated=spec.mask_truncated,
            reference=batch.reference,
            old=batch.old,
            values=batch.values,
            returns=returns,
            few_sizes=materials.graphs is not None,
        )
        state, metrics = update(state, micro)
        reported.append(metrics)
    return state, mean_metrics(reported)


def kl_told(spec: Sampled, batch: JudgedRollout, coef: float) -> Metrics:
    """The KL that is in the reward, and its coefficient."""
    if batch.reference is None or spec.kl_in != "reward":
        return {}
    measured = completion_kl(batch.rollout, batch.reference, spec.kl_estimator)
    return {"rollout/kl": float(measured.double().mean()), "rollout/kl_coef": coef}


def _advantages(spec: Grouped, batch: JudgedRollout, compare: Compare | None) -> torch.Tensor:
    """Advantages [B], or [B, T] where a KL in the reward makes those of a completion's tokens differ."""
    drawn, rewards, reference = batch.rollout, batch.rewards, batch.reference
    if reference is not None and spec.kl_in == "reward":
        if compare is None and spec.baseline == spec.scale == "batch":
            return _whitened_to_go(spec, batch)
        rewards = rewards - spec.kl_coef * completion_kl(drawn, reference, spec.kl_estimator)
    return compared(compare, rewards, drawn.groups, baseline=spec.baseline, scale=spec.scale)


def _whitened_to_go(spec: Grouped, batch: JudgedRollout) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262): the reward less the KL from a token on, whitened over all tokens that count."""
    drawn = batch.rollout
    rewards = token_rewards(spec, batch, spec.kl_coef)
    to_go, _ = gae(rewards, torch.zeros_like(drawn.logp), drawn_places(drawn), gamma=1.0, lam=1.0)
    return whiten(to_go, counted_places(spec, drawn))


def token_rewards(spec: Sampled, batch: JudgedRollout, coef: float) -> torch.Tensor:
    """Rewards [B, T]: that of a completion on its last token, less the KL of every token where it is in the reward."""
    drawn, places = batch.rollout, drawn_places(batch.rollout)
    rewards = terminal_rewards(batch.rewards, places)
    if batch.reference is None or spec.kl_in != "reward":
        return rewards
    return rewards - coef * torch.where(places, kl(drawn.logp, batch.reference, spec.kl_estimator), 0.0)


def counted_places(spec: Sampled, drawn: Rollout) -> torch.Tensor:
    """Where drawn tokens stand that count in a loss: bool [B, T]."""
    places = drawn_places(drawn)
    return places & drawn.finished[:, None] if spec.mask_truncated else places


def surrogate_of(spec: GRPO | PPO) -> Stage:
    """The clipped surrogate of a specification, a stage `Actions -> Sums`."""
    return clipped(
        low=spec.clip_low,
        high=spec.clip_high,
        aggregation=spec.aggregation,
        constant=float(spec.sampling.max_tokens),
        dual=spec.dual_clip,
        kl_coef=kl_of_loss(spec),
        kl_estimator=spec.kl_estimator,
        importance_cap=spec.importance_cap,
        entropy_coef=spec.entropy_coef,
    )


def kl_of_loss(spec: Sampled) -> float:
    """The coefficient of the KL in the loss."""
    return spec.kl_coef if spec.kl_in == "loss" else 0.0


def sampling_of(spec: Sampled, materials: Materials) -> Callable[[TrainState, Prompts], Rollout]:
    """Draws `samples` completions a prompt, keyed by the run's key and the number of rollouts made."""
    rollout, view = sampler(materials.token_policy, materials.stop), materials.drawn_with or materials.view

    def sample(state: TrainState, prompts: Prompts) -> Rollout:
        key = rollout_key(state)
        return rollout(
            view(state.params), prompts, key, spec.sampling, samples=spec.samples, max_rows=materials.max_rows
        )

    return sample


def recalling(spec: GRPO | GSPO | PPO, materials: Materials) -> Callable[[TrainState, JudgedRollout], JudgedRollout]:
    """Adds to a judged rollout what the reference says of the drawn tokens, and the current parameters, where asked for.

    To correct for the rollout, log-probabilities under the parameters that drew are computed again, as training does.
    """
    refer = reference_logp(materials.token_policy, spec.sampling)

    def logp(params: Any, drawn: Rollout) -> torch.Tensor:
        return over_completions(lambda packed: refer(params, packed), drawn, materials.micro_tokens)

    def recall(state: TrainState, batch: JudgedRollout) -> JudgedRollout:
        if spec.kl_coef > 0 and batch.reference is None:
            batch = replace(batch, reference=logp(start_of(state, materials), batch.rollout))
        if spec.importance_cap and batch.old is None:
            batch = replace(batch, old=logp(materials.view(state.params), batch.rollout))
        return batch

    return recall


def updates_of(spec: Repeated, state: TrainState, count: int) -> list[torch.Tensor]:
    """The rows of every update over `count` samples: `epochs` times a shuffle into `minibatches`."""
    shuffle = state.key.fold("minibatches").fold(state.counters.rollout_iteration)
    return [rows for epoch in range(spec.epochs) for rows in minibatches(count, spec.minibatches, shuffle.fold(epoch))]


def iterated(state: TrainState) -> TrainState:
    """The state after a rollout has been used."""
    return replace(state, counters=state.counters.advance_cycle(CycleUnit.ROLLOUT_ITERATION))
