"""On-policy distillation of flow models: a student draws, and learns what its teacher would have done in its states."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import Process, Trajectory
from areno_fn.contracts.flow_batch import Denoising
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowDistill
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.objectives.coupled import distilled
from areno_fn.steps.flow.score import denoising, move, recall
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, moving
from areno_fn.steps.recipes.flow_taught import begun, sampling_all, teacher_of, teacher_policy
from areno_fn.steps.recipes.sampled import iterated


def flow_distill(spec: FlowDistill, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """On-policy distillation (DiffusionOPD, arXiv 2605.15055).

    An iteration draws latents, without noise in the steps or with it, and makes one update: the mean over all steps of the
    distance between what the student and the teacher do in the state that the step begins at. Guidance of the teacher
    becomes the student's own.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of the distance.
    """
    levels, policy, taught_by = spec.denoising, materials.flow_policy, teacher_policy(spec, materials)
    process = Process(dynamics=levels.dynamics, guidance=levels.guidance)
    sample = sampling_all(spec, materials, levels, process, levels.level)
    distance = distilled(spec.space, normalised=spec.normalised)
    update = moving(pipeline(move(policy), losses.get(ACTOR) or distance), materials)
    asked = attrs.evolve(process, guidance=spec.teacher_guidance)
    steps = range(levels.steps) if levels.dynamics == "ode" else None

    def step(state: TrainState, batch: Trajectory) -> tuple[TrainState, Metrics]:
        teacher = teacher_of(spec, state, materials)

        def taught(micro: Denoising) -> Denoising:
            found = recall(taught_by, replace(micro, process=asked), reference=teacher)
            return replace(micro, reference=found.reference)

        nothing = batch.levels.new_zeros(batch.ids.shape[0], device=batch.ids.device)
        found = denoising(batch, nothing, steps=steps, micro=materials.micro_rows or None)
        state, metrics = update(state, [taught(micro) for micro in found])
        return iterated(state), metrics

    return Algorithm(begin=begun(spec, materials), sample=sample, step=step)
