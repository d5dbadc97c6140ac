"""Algorithms that read a data set: supervised fine-tuning and direct preference optimization."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import PackedTokens, Pairs
from areno_fn.contracts.spec import DPO, SFT, Sampling
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline
from areno_fn.steps.joins import Stage
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, beginning, moving, start_of
from areno_fn.steps.token.score import compare, reference_logp, score


def sft(spec: SFT, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Supervised fine-tuning: minimise the negative log-likelihood of response tokens.

    Args:
        losses: for the actor, a stage `Scores -> Sums` instead of the cross entropy.
    """
    loss = losses.get(ACTOR) or cross_entropy(spec.aggregation, constant=float(materials.max_length))
    objective = pipeline(score(materials.token_policy, Sampling()), loss)
    update = moving(objective, materials)

    def step(state: TrainState, batch: tuple[PackedTokens, ...]) -> tuple[TrainState, Metrics]:
        return update(state, batch)

    return Algorithm(begin=beginning(materials, keep_reference=False), sample=None, step=step)


def dpo(spec: DPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Direct preference optimization: raise what is preferred over what is not, relative to the phase's start.

    The reference is the policy that the phase starts from, until `reference_every` renews it. What it says of a pair
    does not change meanwhile, so it is part of the batch, and `refer` says it.

    Args:
        losses: for the actor, a stage `Comparisons -> Sums` instead of the specification's loss.
    """
    loss = losses.get(ACTOR) or preference(spec.beta, loss=spec.loss, label_smoothing=spec.label_smoothing)
    objective = pipeline(compare(materials.token_policy, Sampling()), loss)
    update = moving(objective, materials)
    refer = reference_logp(materials.token_policy, Sampling())

    def step(state: TrainState, batch: tuple[Pairs, ...]) -> tuple[TrainState, Metrics]:
        return update(state, batch)

    def of_start(state: TrainState, packed: PackedTokens) -> torch.Tensor:
        return refer(start_of(state, materials), packed)

    return Algorithm(begin=beginning(materials, keep_reference=True), sample=None, step=step, refer=of_start)
