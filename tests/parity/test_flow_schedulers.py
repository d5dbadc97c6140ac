"""Noise levels and loops against diffusers' own schedulers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from flow_models import numbers

from areno_fn.contracts.flow import Schedule
from areno_fn.steps.flow.schedule import flow_match, intervals, resolution_shift, trained_lowest
from areno_fn.steps.flow.transition import transition
from areno_fn.steps.flow.unipc import Memory, unipc_schedule, unipc_step

LENGTHS = (4, 10, 28, 50)


def field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Some velocity that depends on state and time."""
    return torch.sin(3 * x + t / 250) + 0.5 * x


def theirs(scheduler: Any, start: torch.Tensor) -> torch.Tensor:
    x = start
    for t in scheduler.timesteps:
        x = scheduler.step(field(x, t), t, x, return_dict=False)[0]
    return x


def ours(schedule: Schedule, start: torch.Tensor) -> torch.Tensor:
    x, levels = start, torch.zeros(schedule.steps)
    for step in range(schedule.steps):
        at = intervals(schedule, levels, torch.full((len(x),), step))
        x = transition(x, field(x, at.timestep[0]), at, "ode").mean
    return x


def agree(schedule: Schedule, scheduler: Any) -> None:
    assert (schedule.sigmas - scheduler.sigmas).abs().max() <= 1e-5
    assert (schedule.timesteps - scheduler.timesteps).abs().max() <= 1e-5 * 1000
    start = numbers("start", 2, 3, 5)
    assert (ours(schedule, start) - theirs(scheduler, start)).abs().max() <= 1e-5


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_static_shift_and_default_grid(steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    agree(flow_match(steps, shift=shift, lowest=trained_lowest(shift)), scheduler)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_static_shift_and_the_grid_of_the_pipelines(steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    agree(flow_match(steps, shift=shift), scheduler)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_dynamic_shift(steps: int, length: int) -> None:
    mu = calculate_shift(length)
    assert resolution_shift(length) == pytest.approx(math.exp(mu), rel=1e-12)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    agree(flow_match(steps, shift=resolution_shift(length)), scheduler)
    scheduler.set_timesteps(steps, mu=mu)
    agree(flow_match(steps, shift=resolution_shift(length), lowest=trained_lowest()), scheduler)


@pytest.mark.parametrize("steps", LENGTHS)
def test_dynamic_shift_stretched_to_a_terminal_level(steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=0.8)
    agree(flow_match(steps, shift=math.exp(0.8), terminal=0.1), scheduler)


def test_a_shift_applied_twice_is_found() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 10, 10))
    twice = flow_match(10, shift=9.0)
    assert (twice.sigmas - scheduler.sigmas).abs().max() > 0.1


# ------------------------------------------------------------------------------------------ UniPC


def theirs_unipc(steps: int, shift: float, order: int) -> UniPCMultistepScheduler:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=order
    )
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shift", [1.0, 3.0, resolution_shift(1024)])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc(steps: int, shift: float, order: int) -> None:
    scheduler, schedule = theirs_unipc(steps, shift, order), unipc_schedule(steps, shift=shift)
    assert (schedule.sigmas - scheduler.sigmas).abs().max() <= 1e-6
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    x, memory = numbers("start", 2, 3, 5), Memory()
    start = x
    for step in range(steps):
        x, memory = unipc_step(memory, x, field(x, schedule.timesteps[step]), schedule, step, order)
    assert (x - theirs(scheduler, start)).abs().max() <= 1e-5


def test_unipc_is_nearer_to_the_truth_than_euler() -> None:
    """v = x, whose solution shrinks by e over the path: 10 steps of UniPC are nearer than 100 of Euler."""
    schedule, x, memory = unipc_schedule(10), torch.ones(1, 1, dtype=torch.float64), Memory()
    for step in range(10):
        x, memory = unipc_step(memory, x, x, schedule, step)
    assert abs(x.item() - math.exp(-1)) < abs((1 - 1 / 100) ** 100 - math.exp(-1))
