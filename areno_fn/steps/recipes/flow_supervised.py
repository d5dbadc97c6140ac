"""Supervised training of flow models on clean latents."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow_batch import Clean
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowSFT
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.conditions import dropped
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import noised, predict
from areno_fn.steps.flow.times import Times
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, beginning, moving


def flow_sft(spec: FlowSFT, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow matching (arXiv 2210.02747): the velocity at a random noise level of every latent.

    Levels, noise and which conditions are left out are functions of the run's key, the number of the step and the name
    of the latent.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of the squared error.
    """
    times = Times(kind=spec.times, shift=spec.shift)
    update = moving(
        pipeline(predict(materials.policy), losses.get(ACTOR) or velocity_matching(spec.weighting)), materials
    )

    def step(state: TrainState, batch: Clean) -> tuple[TrainState, Metrics]:
        key = state.key.fold("levels").fold(state.counters.optimizer_step)
        prompts, conditions = batch.prompts, batch.prompts.conditions
        if spec.dropout:
            conditions = dropped(conditions, key.fold("dropout"), prompts.ids, spec.dropout)
        positive = replace(conditions, negative=None)
        return update(state, noised(batch.latents, positive, prompts.ids, key, times, mask=prompts.mask))

    return Algorithm(begin=beginning(materials, keep_reference=False), sample=None, step=step)
