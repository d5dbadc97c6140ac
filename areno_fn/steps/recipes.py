"""Named algorithms: each is a short composition of stages that can be used alone.

A recipe turns a specification into an `Algorithm`: pure functions from a state and a batch to a state and
metrics. What has effects (drawing rows, asking rewards, writing files) happens between them, in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout, PackedTokens, Prompts, Rollout
from areno_fn.contracts.execution import DATASET_NONE, GENERATION_REWARD, CycleUnit, ExecutionContract
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GRPO, SFT, AlgorithmSpec, Sampling
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import View, pipeline, train_step
from areno_fn.steps.joins import Stage
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.token.experience import experience, minibatches, with_reference
from areno_fn.steps.token.report import describe, mean_metrics
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, reference_logp, score

ACTOR = "actor"
REFERENCE = "reference"


def actor(params: Mapping[str, Any]) -> Any:
    """The view of a run that trains all parameters: those of the actor, as they are."""
    return params[ACTOR]


@attrs.frozen(kw_only=True)
class Materials:
    """What a recipe is built from.

    Attributes:
        policy: the model's functions.
        optimizer: moves the actor.
        stop: token ids that end a completion.
        micro_tokens: token budget of a micro-batch.
        max_length: longest training row, the length that "constant_length" divides by where no other is given.
        max_rows: most sequences decoded at once.
        view: from the parameters of all roles to what the policy takes; rollouts, training and the reference use it.
    """

    policy: TokenPolicy
    optimizer: Optimizer
    stop: tuple[int, ...]
    micro_tokens: int = 8192
    max_length: int = 1024
    max_rows: int = 1024
    view: View = actor


@attrs.frozen(kw_only=True)
class Algorithm:
    """One phase of training as pure functions.

    Attributes:
        begin: readies a state for the phase: a fresh optimizer state, snapshots taken of the parameters.
        sample: draws completions for a batch of prompts; None for algorithms that read a data set.
        step: `(state, batch) -> (state, metrics)`; the batch is a tuple of `PackedTokens` micro-batches
            for data-set algorithms and a `JudgedRollout` for generating ones.
    """

    begin: Callable[[TrainState], TrainState]
    sample: Callable[[TrainState, Prompts], Rollout] | None
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def sft(spec: SFT, materials: Materials, loss: Stage | None = None) -> Algorithm:
    """Supervised fine-tuning: minimise the negative log-likelihood of response tokens.

    Args:
        loss: a stage `Scores -> Sums` instead of the cross entropy.
    """
    loss = loss or cross_entropy(spec.aggregation, constant=float(materials.max_length))
    objective = pipeline(score(materials.policy, Sampling()), loss)
    update = train_step(objective, materials.optimizer, role=ACTOR, view=materials.view)

    def step(state: TrainState, batch: tuple[PackedTokens, ...]) -> tuple[TrainState, Metrics]:
        return update(state, batch)

    return Algorithm(begin=_begin(materials.optimizer, keep_reference=False), sample=None, step=step)


def grpo(spec: GRPO, materials: Materials, loss: Stage | None = None) -> Algorithm:
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300, with the choices of DAPO as options).

    Every iteration draws `samples` completions a prompt, takes the reward's deviation from its group as the
    advantage of all tokens of a completion, and minimises the clipped surrogate against the log-probabilities
    recorded while sampling.

    Args:
        loss: a stage `Actions -> Sums` instead of the clipped surrogate.
    """
    policy, view, keep_reference = materials.policy, materials.view, spec.kl_coef > 0
    rollout = sampler(policy, materials.stop)
    objective = pipeline(act(policy, spec.sampling), loss or _surrogate(spec))
    update = train_step(objective, materials.optimizer, role=ACTOR, view=materials.view)
    refer = reference_logp(policy, spec.sampling)

    def sample(state: TrainState, prompts: Prompts) -> Rollout:
        key = state.key.fold("rollout").fold(state.counters.rollout_iteration)
        return rollout(
            view(state.params), prompts, key, spec.sampling, samples=spec.samples, max_rows=materials.max_rows
        )

    def step(state: TrainState, batch: JudgedRollout) -> tuple[TrainState, Metrics]:
        advantages = group_advantages(batch.rewards, batch.rollout.groups, scale=spec.scale)
        shuffle = state.key.fold("minibatches").fold(state.counters.rollout_iteration)
        reported = []
        for epoch in range(spec.epochs):
            for rows in minibatches(batch.rollout.lengths.shape[0], spec.minibatches, shuffle.fold(epoch)):
                micro = experience(
                    batch.rollout,
                    advantages,
                    rows=rows,
                    micro_tokens=materials.micro_tokens,
                    mask_truncated=spec.mask_truncated,
                )
                if keep_reference:
                    start = view({**state.params, ACTOR: state.snapshots[REFERENCE]})
                    micro = tuple(with_reference(m, refer(start, m.packed)) for m in micro)
                state, metrics = update(state, micro)
                reported.append(metrics)
        state = replace(state, counters=state.counters.advance_cycle(CycleUnit.ROLLOUT_ITERATION))
        return state, mean_metrics(reported) | describe(batch, advantages)

    return Algorithm(begin=_begin(materials.optimizer, keep_reference=keep_reference), sample=sample, step=step)


def _surrogate(spec: GRPO) -> Stage:
    return clipped(
        low=spec.clip_low,
        high=spec.clip_high,
        aggregation=spec.aggregation,
        constant=float(spec.sampling.max_tokens),
        kl_coef=spec.kl_coef,
        kl_estimator=spec.kl_estimator,
    )


def _begin(optimizer: Optimizer, *, keep_reference: bool) -> Callable[[TrainState], TrainState]:
    def begin(state: TrainState) -> TrainState:
        snapshots = {REFERENCE: state.params[ACTOR]} if keep_reference else {}
        return replace(state, optim={ACTOR: optimizer.init(state.params[ACTOR])}, snapshots=snapshots)

    return begin


@attrs.frozen(kw_only=True)
class Recipe:
    """An algorithm's builder and the contract it was written for."""

    execution: ExecutionContract
    build: Callable[[Any, Materials, Stage | None], Algorithm]


RECIPES: dict[type[AlgorithmSpec], Recipe] = {
    SFT: Recipe(execution=DATASET_NONE, build=sft),
    GRPO: Recipe(execution=GENERATION_REWARD, build=grpo),
}
"""The only registry of algorithms. A specification's `execution` and its recipe's must be one constant."""

for _spec, _recipe in RECIPES.items():
    if _spec.execution is not _recipe.execution:
        raise TypeError(
            f"{_spec.__name__} declares {_spec.execution}, but its recipe was written for {_recipe.execution}"
        )


def build(spec: AlgorithmSpec, materials: Materials, loss: Stage | None = None) -> Algorithm:
    """The algorithm of a specification, with its own loss or with one given.

    Raises:
        JoinError: the loss does not take what the algorithm's score stage returns, or does not return `Sums`.
    """
    return RECIPES[type(spec)].build(spec, materials, loss)
