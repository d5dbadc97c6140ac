"""On-policy distillation of flow models: a student draws, and learns what its teacher would have done in its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import Process, Trajectory
from areno_fn.contracts.flow_policy import FlowPolicy
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
    becomes the student's own. Of several teachers each is asked about what was drawn for its data sets.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of the distance.
    """
    levels, policy = spec.denoising, materials.flow_policy
    process = Process(dynamics=levels.dynamics, guidance=levels.guidance)
    sample = sampling_all(spec, materials, levels, process, levels.level)
    distance = distilled(spec.space, normalised=spec.normalised)
    update = moving(pipeline(move(policy), losses.get(ACTOR) or distance), materials)
    asked = attrs.evolve(process, guidance=spec.teacher_guidance)
    steps = range(levels.steps) if levels.dynamics == "ode" else None

    def step(state: TrainState, batch: Trajectory) -> tuple[TrainState, Metrics]:
        nothing = batch.levels.new_zeros(batch.ids.shape[0], device=batch.ids.device)
        taught = []
        for taught_by, teacher, rows in _teaching(spec, state, materials, batch):
            for micro in denoising(batch, nothing, steps=steps, rows=rows, micro=materials.micro_rows or None):
                found = recall(taught_by, replace(micro, process=asked), reference=teacher)
                taught.append(replace(micro, reference=found.reference))
        state, metrics = update(state, taught)
        return iterated(state), metrics

    return Algorithm(begin=begun(spec, materials), sample=sample, step=step)


def _teaching(
    spec: FlowDistill, state: TrainState, materials: Materials, drawn: Trajectory
) -> list[tuple[FlowPolicy, Any, torch.Tensor | None]]:
    """Functions and parameters of every teacher of something that was drawn, and the rows that it teaches; None for all."""
    if not spec.teachers:
        return [(teacher_policy(spec, materials), teacher_of(spec, state, materials), None)]
    # a prompt is named by its row in the data, or where it is there again by a number that leaves the same remainder
    place = (drawn.groups % len(materials.sources)).tolist()
    found: list[tuple[FlowPolicy, Any, torch.Tensor | None]] = []
    for one in spec.teachers:
        rows = [row for row, prompt in enumerate(place) if materials.sources[prompt] in one.data]
        if rows:
            taught_by = materials.teachers[one.path]
            found.append((taught_by.policy, state.params[taught_by.role], torch.tensor(rows)))
    return found
