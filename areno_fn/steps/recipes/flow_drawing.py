"""How a specification has flow models draw: schedule, process, and one latent a prompt for evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn.contracts.flow import FlowPrompts, Process, Schedule
from areno_fn.contracts.flow_adapter import EVEN, NoiseLevels
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising, Levels, NoisyDenoising
from areno_fn.steps.flow.parts import limited
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match, late
from areno_fn.steps.flow.unipc import unipc_schedule


def schedule_of(spec: Levels, own: NoiseLevels = EVEN) -> Schedule:
    """The noise levels that a specification draws through: those of the model's `own` scheduler, or with another shift.

    Raises:
        SpecError: of what begins with a given medium no step is left.
    """
    levels = NoiseLevels(shift=spec.shift) if spec.shift else own
    shift, said = levels.shift_of(spec.steps), isinstance(spec, Denoising | NoisyDenoising) and spec.strength
    if isinstance(spec, Denoising) and spec.solver == "unipc":
        whole = unipc_schedule(spec.steps, shift=shift)
    else:
        whole = flow_match(spec.steps, shift=shift, lowest=levels.lowest, terminal=levels.terminal)
    return late(whole, said or own.strength)


def process_of(spec: Levels) -> Process:
    """How a specification draws: with noise in its steps, or by the ODE; guided by as much as it says."""
    if isinstance(spec, NoisyDenoising):
        return Process(dynamics=spec.dynamics, guidance=spec.guidance)
    return Process(
        dynamics="ode", guidance=spec.guidance, solver=spec.solver if isinstance(spec, Denoising) else "euler"
    )


Draw = Callable[[Any, FlowPrompts, Key, Denoising, int], torch.Tensor]
"""`(params, prompts, key, spec, max_rows) -> latents [B, *]`."""


def drawing(policy: FlowPolicy, own: NoiseLevels = EVEN) -> Draw:
    """A function that draws one latent a prompt by the ODE, as evaluations do.

    It draws at most `max_rows` at once, which changes nothing: noise is a function of the key and the prompt's name.

    Args:
        policy: the model.
        own: how its scheduler spaces noise levels.
    """

    def draw(params: Any, prompts: FlowPrompts, key: Key, spec: Denoising, max_rows: int) -> torch.Tensor:
        rollout, schedule = limited(flow_sampler(policy, process_of(spec)), max_rows), schedule_of(spec, own)
        return rollout(params, prompts, key, schedule, torch.zeros(schedule.steps)).final

    return draw
