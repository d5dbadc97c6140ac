"""Named algorithms: each is a short composition of stages that can be used alone.

A recipe turns a specification into an `Algorithm`: pure functions from a state and a batch to a state and
metrics. What has effects (drawing rows, asking rewards, writing files) happens between them, in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout, PackedTokens, Pairs, Prompts, Rollout
from areno_fn.contracts.execution import DATASET_NONE, GENERATION_REWARD, CycleUnit, ExecutionContract
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import DPO, GRPO, GSPO, SFT, AlgorithmSpec, Sampled, Sampling
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import View, pipeline, train_step
from areno_fn.steps.joins import Stage
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.token.experience import completion_kl, completion_logp, experience, minibatches
from areno_fn.steps.token.report import describe, mean_metrics
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, compare, reference_logp, score

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
            or `Pairs` micro-batches for data-set algorithms and a `JudgedRollout` for generating ones.
        refer: log-probabilities [M] that the frozen reference gives packed pairs; None for algorithms without pairs.
    """

    begin: Callable[[TrainState], TrainState]
    sample: Callable[[TrainState, Prompts], Rollout] | None
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    refer: Callable[[TrainState, PackedTokens], torch.Tensor] | None = None


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


def dpo(spec: DPO, materials: Materials, loss: Stage | None = None) -> Algorithm:
    """Direct preference optimization: raise what is preferred over what is not, relative to the phase's start.

    The reference is the policy that the phase starts from. What it says of a pair does not change, so it is part
    of the batch, and `refer` says it.

    Args:
        loss: a stage `Comparisons -> Sums` instead of the specification's loss.
    """
    loss = loss or preference(spec.beta, loss=spec.loss, label_smoothing=spec.label_smoothing)
    objective = pipeline(compare(materials.policy, Sampling()), loss)
    update = train_step(objective, materials.optimizer, role=ACTOR, view=materials.view)
    refer = reference_logp(materials.policy, Sampling())

    def step(state: TrainState, batch: tuple[Pairs, ...]) -> tuple[TrainState, Metrics]:
        return update(state, batch)

    def of_start(state: TrainState, packed: PackedTokens) -> torch.Tensor:
        return refer(_start(state, materials.view), packed)

    return Algorithm(begin=_begin(materials.optimizer, keep_reference=True), sample=None, step=step, refer=of_start)


def grpo(spec: GRPO, materials: Materials, loss: Stage | None = None) -> Algorithm:
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300, with the choices of DAPO as options).

    Every iteration draws `samples` completions a prompt, takes the reward's deviation from a baseline as the
    advantage of all tokens of a completion, and minimises the clipped surrogate against the log-probabilities
    recorded while sampling.

    Args:
        loss: a stage `Actions -> Sums` instead of the clipped surrogate.
    """
    surrogate = clipped(
        low=spec.clip_low,
        high=spec.clip_high,
        aggregation=spec.aggregation,
        constant=float(spec.sampling.max_tokens),
        dual=spec.dual_clip,
        kl_coef=_kl_of_loss(spec),
        kl_estimator=spec.kl_estimator,
        importance_cap=spec.importance_cap,
    )
    return _policy_gradient(spec, materials, loss or surrogate, again=spec.importance_cap > 0)


def gspo(spec: GSPO, materials: Materials, loss: Stage | None = None) -> Algorithm:
    """Group sequence policy optimization (arXiv 2507.18071): as `grpo`, with one ratio and one term a completion.

    Args:
        loss: a stage `Actions -> Sums` instead of the surrogate.
    """
    surrogate = sequence_clipped(
        low=spec.clip_low, high=spec.clip_high, kl_coef=_kl_of_loss(spec), kl_estimator=spec.kl_estimator
    )
    return _policy_gradient(spec, materials, loss or surrogate)


def _kl_of_loss(spec: Sampled) -> float:
    return spec.kl_coef if spec.kl_in == "loss" else 0.0


def _policy_gradient(spec: Sampled, materials: Materials, loss: Stage, *, again: bool = False) -> Algorithm:
    """Draw, judge, compare, and make `epochs` x `minibatches` updates.

    Args:
        again: the log-probabilities under the parameters that drew are computed again, as training computes them.
    """
    policy, view, keep_reference = materials.policy, materials.view, spec.kl_coef > 0
    rollout = sampler(policy, materials.stop)
    objective = pipeline(act(policy, spec.sampling), loss)
    update = train_step(objective, materials.optimizer, role=ACTOR, view=view)
    refer = reference_logp(policy, spec.sampling)

    def sample(state: TrainState, prompts: Prompts) -> Rollout:
        key = state.key.fold("rollout").fold(state.counters.rollout_iteration)
        return rollout(
            view(state.params), prompts, key, spec.sampling, samples=spec.samples, max_rows=materials.max_rows
        )

    def drawn_logp(params: Any, drawn: Rollout) -> torch.Tensor:
        return completion_logp(lambda packed: refer(params, packed), drawn, materials.micro_tokens)

    def step(state: TrainState, batch: JudgedRollout) -> tuple[TrainState, Metrics]:
        drawn, rewards = batch.rollout, batch.rewards
        reference = drawn_logp(_start(state, view), drawn) if keep_reference else None
        old = drawn_logp(view(state.params), drawn) if again else None
        if reference is not None and spec.kl_in == "reward":
            rewards = rewards - spec.kl_coef * completion_kl(drawn, reference, spec.kl_estimator)
        advantages = group_advantages(rewards, drawn.groups, baseline=spec.baseline, scale=spec.scale)
        shuffle = state.key.fold("minibatches").fold(state.counters.rollout_iteration)
        reported = []
        for epoch in range(spec.epochs):
            for rows in minibatches(drawn.lengths.shape[0], spec.minibatches, shuffle.fold(epoch)):
                micro = experience(
                    drawn,
                    advantages,
                    rows=rows,
                    micro_tokens=materials.micro_tokens,
                    mask_truncated=spec.mask_truncated,
                    reference=reference,
                    old=old,
                )
                state, metrics = update(state, micro)
                reported.append(metrics)
        state = replace(state, counters=state.counters.advance_cycle(CycleUnit.ROLLOUT_ITERATION))
        return state, mean_metrics(reported) | describe(batch, advantages)

    return Algorithm(begin=_begin(materials.optimizer, keep_reference=keep_reference), sample=sample, step=step)


def _start(state: TrainState, view: View) -> Any:
    """What the policy took when the phase began."""
    return view({**state.params, ACTOR: state.snapshots[REFERENCE]})


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
    DPO: Recipe(execution=DATASET_NONE, build=dpo),
    GRPO: Recipe(execution=GENERATION_REWARD, build=grpo),
    GSPO: Recipe(execution=GENERATION_REWARD, build=gspo),
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
