"""What the recipes of flow models that learn from a teacher have in common: its parameters, and roles that begin as copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import FlowPrompts, Process, Trajectory
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowTaught, Levels, folders_of
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import View
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.parts import limited
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.recipes.algorithm import ACTOR, Materials, Update, beginning, rollout_key, start_of
from areno_fn.steps.recipes.flow_drawing import schedule_of
from areno_fn.steps.variants import snapshot

TEACHER = "teacher"
"""The frozen role that a teacher's folder is read into; those of further folders are called `teacher_2` and so on."""

FAKE = "fake"
"""The role that follows what the generator makes."""

SURROGATE = "surrogate"
"""The role that follows rewards."""


def teacher_policy(spec: FlowTaught, materials: Materials) -> FlowPolicy:
    """The functions of the teacher, which may be another model than the actor."""
    return materials.teachers[spec.teacher].policy if spec.teacher else materials.flow_policy


def teacher_of(spec: FlowTaught, state: TrainState, materials: Materials) -> Any:
    """The parameters of the teacher: those of its folder, or what the policy took when the phase began."""
    if spec.teacher:
        return state.params[materials.teachers[spec.teacher].role]
    return start_of(state, materials)


def seen_as(role: str, view: View) -> View:
    """What the policy takes of another role, which is made as the actor is."""
    return lambda params: view({**params, ACTOR: params[role]})


def begun(
    spec: FlowTaught,
    materials: Materials,
    copies: Sequence[str] = (),
    controls: Mapping[str, int | float] | None = None,
) -> Callable[[TrainState], TrainState]:
    """A function that readies a state for a phase: `copies` of the actor, the teacher's snapshot, fresh optimizers.

    Args:
        copies: roles that begin as the actor.
        controls: the numbers that the phase begins with.
    """
    ready = beginning(materials, keep_reference=not folders_of(spec), controls=controls)

    def begin(state: TrainState) -> TrainState:
        # what the optimizer of another copy has kept is nothing of this one's
        optim = {role: kept for role, kept in state.optim.items() if role not in copies}
        made = {role: snapshot(state.params[ACTOR]) for role in copies}
        return ready(replace(state, params={**state.params, **made}, optim=optim))

    return begin


def sampling_all(
    spec: FlowTaught, materials: Materials, levels: Levels, process: Process, eta: float = 0.0
) -> Callable[[TrainState, FlowPrompts], Trajectory]:
    """Draws `samples` latents a prompt, of which the states of all steps that are learned from are kept.

    Args:
        levels: of the steps.
        process: how.
        eta: the noise of all steps but the last; 0 keeps the steps of the ODE.
    """
    rollout = limited(flow_sampler(materials.flow_policy, process), materials.micro_rows)
    drawn_with = materials.drawn_with or materials.view
    schedule = schedule_of(levels, materials.levels)
    noise = noise_levels(schedule.steps, None, eta) if eta else torch.zeros(schedule.steps)
    keep = None if eta else range(schedule.steps)

    def sample(state: TrainState, prompts: FlowPrompts) -> Trajectory:
        key = rollout_key(state)
        return rollout(drawn_with(state.params), prompts, key, schedule, noise, samples=spec.samples, keep=keep)

    return sample


def reported_as(role: str, update: Update) -> Update:
    """An update whose metrics of flow models are named after its role, so that several can be told apart."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update(state, batch)
        return state, {name.replace("flow/", f"{role}/"): value for name, value in metrics.items()}

    return step
