"""What was drawn, noised again: to which levels, in which micro-batches, and what frozen parameters say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from areno_fn import tree
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.flow_adapter import NoiseLevels
from areno_fn.contracts.flow_batch import Noised
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowNoised
from areno_fn.contracts.state import TrainState
from areno_fn.steps.flow.parts import limited
from areno_fn.steps.flow.path import noised, remember, rows_of
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.times import Grid, Times, grid_steps
from areno_fn.steps.recipes.algorithm import Materials, rollout_key
from areno_fn.steps.recipes.flow_drawing import process_of, schedule_of
from areno_fn.steps.recipes.flow_groups import parts
from areno_fn.steps.recipes.flow_levels import trained_levels, trained_steps

T = TypeVar("T")


def noiseless(
    spec: FlowNoised, materials: Materials, draws: Callable[[TrainState], Any]
) -> Callable[[TrainState, FlowPrompts], Trajectory]:
    """Draws `samples` latents a prompt by the ODE, keyed by the run's key and the number of rollouts made.

    Args:
        draws: from a state to the parameters that draw.
    """
    rollout = limited(flow_sampler(materials.flow_policy, process_of(spec.denoising)), materials.micro_rows)
    schedule = schedule_of(spec.denoising, materials.levels)

    def sample(state: TrainState, prompts: FlowPrompts) -> Trajectory:
        key = rollout_key(state)
        return rollout(draws(state), prompts, key, schedule, torch.zeros(schedule.steps), samples=spec.samples)

    return sample


def times_of(spec: FlowNoised, own: NoiseLevels) -> Times | Grid:
    """The distribution of the levels that are trained at, perhaps those of the schedule that is drawn by.

    Raises:
        SpecError: at none of them is asked what is trained.
    """
    if spec.times == "grid":
        schedule = schedule_of(spec.denoising, own)
        steps = grid_steps(schedule.steps, 0.0, spec.until)
        return Grid(schedule=schedule, steps=trained_steps(steps, schedule, own))
    low, high = trained_levels(own, spec.until)
    return Times(kind=spec.times, shift=spec.shift, low=low, high=high)


def noised_again(
    spec: FlowNoised,
    drawn: Trajectory,
    advantages: torch.Tensor,
    rows: torch.Tensor,
    key: Key,
    times: Times | Grid,
    *,
    together: bool = False,
    one_noise: bool = False,
    most: int = 0,
) -> tuple[Noised, ...]:
    """The micro-batches of an update: `terms` levels of every row, drawn with the key.

    Args:
        drawn: the rollout.
        advantages: float32 [B].
        rows: int64, of the update.
        key: names levels and noise.
        times: the distribution of the levels.
        together: rows of one group, which stand together, share level and noise, and stay in one micro-batch.
        one_noise: the noise is the same at all levels.
        most: rows of a micro-batch; 0 for all.
    """
    groups = drawn.groups[rows]
    batches = noised(
        drawn.final[rows],
        tree.map(lambda x: x[rows], drawn.conditions),
        drawn.ids[rows],
        key,
        times,
        terms=spec.terms,
        shared=groups if together else None,
        one_noise=one_noise,
        advantage=advantages[rows],
        groups=groups,
        mask=None if drawn.mask is None else drawn.mask[rows],
    )
    return split(batches, groups if together else drawn.ids[rows], most)


def split(batches: tuple[T, ...], units: torch.Tensor, most: int) -> tuple[T, ...]:
    """The same rows in micro-batches of at most so many (0: as they are), in which no unit is torn apart."""
    cut = parts(units, most)
    return batches if len(cut) == 1 else tuple(rows_of(batch, part) for batch in batches for part in cut)


def remembered(policy: FlowPolicy, batch: Noised, frozen: Mapping[str, Any], guidance: float = 1.0) -> Noised:
    """The batch with the velocities of frozen parameters, by field; the reference's is guided by `guidance`."""
    others = {name: params for name, params in frozen.items() if name != "reference"}
    known = remember(policy, batch, **others)
    if "reference" not in frozen:
        return known
    led = remember(policy, replace(batch, guidance=guidance), reference=frozen["reference"])
    return replace(known, reference=led.reference)
