"""Algorithms of flow models that read a data set: flow matching, and Diffusion-DPO of given pairs."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow_batch import Clean
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowDPO, FlowSFT
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.conditions import dropped
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.objectives.preference import diffusion_dpo
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.times import Times
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, beginning, moving
from areno_fn.steps.recipes.flow_again import split
from areno_fn.steps.recipes.flow_copies import flow_beginning, reference_of
from areno_fn.steps.recipes.flow_levels import trained_levels


def flow_sft(spec: FlowSFT, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow matching (arXiv 2210.02747): the velocity at a random noise level of every latent.

    Levels, noise and which conditions are left out are functions of the run's key, the number of the step and the name
    of the latent.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of the squared error.
    """
    low, high = trained_levels(materials.levels)
    times = Times(kind=spec.times, shift=spec.shift, low=low, high=high)
    update = moving(
        pipeline(predict(materials.flow_policy), losses.get(ACTOR) or velocity_matching(spec.weighting)), materials
    )

    def step(state: TrainState, batch: Clean) -> tuple[TrainState, Metrics]:
        key = state.key.fold("levels").fold(state.counters.optimizer_step)
        prompts, conditions = batch.prompts, batch.prompts.conditions
        if spec.condition_dropout:
            conditions = dropped(conditions, key.fold("dropout"), prompts.ids, spec.condition_dropout)
        positive = replace(conditions, negative=None)
        micro = noised(batch.latents, positive, prompts.ids, key, times, mask=prompts.mask)
        return update(state, split(micro, prompts.ids, materials.micro_rows))

    return Algorithm(begin=beginning(materials, keep_reference=False), sample=None, step=step)


def flow_dpo(spec: FlowDPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Diffusion-DPO (arXiv 2311.12908) of pairs: rows 2 k and 2 k + 1 of a batch, the preferred one first.

    Both share level and noise, by the name of the pair, half that of its rows; each has its own condition.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    policy = materials.flow_policy
    low, high = trained_levels(materials.levels, spec.until)
    times = Times(kind=spec.times, shift=spec.shift, low=low, high=high)
    update = moving(pipeline(predict(policy), losses.get(ACTOR) or diffusion_dpo(spec.beta)), materials)

    def step(state: TrainState, batch: Clean) -> tuple[TrainState, Metrics]:
        key = state.key.fold("levels").fold(state.counters.optimizer_step)
        prompts, pairs = batch.prompts, batch.prompts.ids // 2
        positive = replace(prompts.conditions, negative=None)
        micro = noised(
            batch.latents, positive, prompts.ids, key, times, terms=spec.terms, shared=pairs, mask=prompts.mask
        )
        micro = split(micro, pairs, materials.micro_rows)
        reference = reference_of(spec, state, materials)
        return update(state, tuple(remember(policy, one, reference=reference) for one in micro))

    return Algorithm(begin=flow_beginning(spec, materials), sample=None, step=step)
