"""Sampling: the transition folded over a schedule, with exactly what training will score again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked, received
from areno_fn.contracts.errors import DataError, SpecError
from areno_fn.contracts.flow import FlowPrompts, Process, Schedule, Trajectory
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import shown
from areno_fn.steps.flow.guidance import guided
from areno_fn.steps.flow.latents import live
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.schedule import intervals, places
from areno_fn.steps.flow.transition import draw, log_prob, transition
from areno_fn.steps.flow.unipc import Memory, unipc_step


@checked
def flow_sampler(policy: FlowPolicy, process: Process) -> Callable[..., Trajectory]:
    """A function that draws latents for prompts.

    The function is `rollout(params, prompts, key, schedule, levels, *, samples=1, keep=None, dtype=float32)`. Sample
    s of prompt p is named `p.id * samples + s`; its noise is a function of the key, that name and the step.

    Args:
        policy: the model.
        process: dynamics, guidance and the reduction of log-probabilities.

    Raises:
        SpecError: the policy lacks a part of `FlowPolicy`.
        RecordError: the process is none.
    """
    ask = guided(policy, process.guidance)

    @checked
    def rollout(
        params: Any,
        prompts: FlowPrompts,
        key: Key,
        schedule: Schedule,
        levels: torch.Tensor,
        *,
        samples: int = 1,
        keep: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Trajectory:
        """Draws `samples` latents for every prompt, rows ordered by prompt, without a gradient.

        Args:
            params: the model's parameters.
            prompts: conditions with distinct ids.
            key: the random stream of this rollout.
            schedule: the noise levels.
            levels: float32 [T], eta of every step; see `noise_levels`.
            samples: latents a prompt.
            keep: steps whose two states are stored, negative ones from the end; those with noise when omitted.
            dtype: of the states. What is drawn is rounded to it before its log-probability is taken.

        Raises:
            SpecError: levels or steps do not fit the schedule or the dynamics.
            DataError: there is no prompt, two share an id, or a mask or what is begun near has another shape.
            RecordError: an argument is of another type.
        """
        noisy = _noisy_steps(process, schedule, levels)
        kept = places(noisy if keep is None else keep, schedule.steps)
        check_prompts(prompts, samples)
        place = torch.arange(prompts.ids.shape[0] * samples, device=prompts.ids.device)
        owner = place // samples
        ids = prompts.ids[owner] * samples + place % samples
        conditions = tree.map(lambda x: x[owner], prompts.conditions)
        mask = None if prompts.mask is None else _masks(prompts.mask, policy.latent_shape)[owner]
        tape = _Tape(kept=kept, noisy=noisy)
        memory = Memory()
        with torch.no_grad():
            state = latent_noise(key.fold("start"), ids, policy.latent_shape)
            if prompts.begin is not None:
                state = _noised(prompts.begin[owner], state, schedule)
            state = live(state, mask).to(dtype)
            for step in range(schedule.steps):
                tape.see_state(step, state)
                interval = intervals(schedule, levels, torch.full_like(ids, step))
                velocity = ask(params, state, interval.timestep, conditions)
                if process.solver == "unipc":
                    following, memory = unipc_step(memory, state, velocity, schedule, step)
                    state = live(following, mask).to(dtype)
                    continue
                now = transition(state, velocity, interval, process.dynamics)
                noise = torch.zeros_like(now.mean)
                if step in noisy:
                    noise = latent_noise(key.fold("step"), ids, policy.latent_shape, step)
                state = live(draw(now, noise, dtype), mask).to(dtype)
                if step in tape.scored:
                    tape.logp.append(log_prob(now, state, over=process.over, likelihood=process.likelihood, mask=mask))
            tape.see_state(schedule.steps, state)
        return tape.trajectory(
            conditions=conditions,
            groups=prompts.ids[owner],
            ids=ids,
            final=state,
            schedule=schedule,
            levels=levels,
            mask=mask,
            process=process,
        )

    return rollout


def _noised(begin: torch.Tensor, noise: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Clean latents at the first level of a schedule."""
    if begin.shape != noise.shape:
        raise DataError(f"the latents to begin near must be {list(noise.shape)}, received {list(begin.shape)}")
    level = schedule.sigmas[0].to(noise.device)
    return (1 - level) * begin.to(noise) + level * noise


def _masks(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if mask.dtype != torch.bool or mask.shape[1:] != shape:
        raise DataError(f"a mask of latents must be bool {['B', *shape]}, received {shown(mask)}")
    return mask


@attrs.frozen(kw_only=True)
class _Tape:
    """What a rollout keeps while it runs."""

    kept: tuple[int, ...]
    noisy: tuple[int, ...]
    states: list[torch.Tensor] = attrs.field(factory=list)
    logp: list[torch.Tensor] = attrs.field(factory=list)

    @property
    def needed(self) -> tuple[int, ...]:
        """Both states of every kept step."""
        return tuple(sorted({i for step in self.kept for i in (step, step + 1)}))

    @property
    def scored(self) -> tuple[int, ...]:
        """The kept steps that have a density."""
        return tuple(step for step in self.kept if step in self.noisy)

    def see_state(self, index: int, state: torch.Tensor) -> None:
        """State `index` has been reached."""
        if index in self.needed:
            self.states.append(state)

    def trajectory(self, *, final: torch.Tensor, schedule: Schedule, **fields: Any) -> Trajectory:
        """The record of the finished rollout."""
        rows = final.shape[0]
        states = torch.stack(self.states, 1) if self.states else final.new_zeros(rows, 0, *final.shape[1:])
        logp = torch.stack(self.logp, 1) if self.logp else final.new_zeros(rows, 0, dtype=torch.float32)
        return Trajectory(
            final=final,
            schedule=schedule,
            states=states,
            logp=logp,
            state_map=_table(self.needed, schedule.steps + 1),
            transition_map=_table(self.scored, schedule.steps),
            **fields,
        )


def _table(stored: tuple[int, ...], length: int) -> tuple[int, ...]:
    return tuple(stored.index(i) if i in stored else -1 for i in range(length))


def _noisy_steps(process: Process, schedule: Schedule, levels: torch.Tensor) -> tuple[int, ...]:
    if levels.shape != schedule.timesteps.shape:
        raise SpecError(
            f"a schedule of {schedule.steps} steps needs {schedule.steps} noise levels, received {tuple(levels.shape)}"
        )
    etas = levels.tolist()
    if not all(0 <= eta < math.inf for eta in etas):
        raise SpecError(f"noise levels are finite and at least 0, received {etas}")
    noisy = tuple(step for step, eta in enumerate(etas) if eta)
    if process.dynamics == "ode" and noisy:
        raise SpecError(f"the dynamics 'ode' adds no noise, but step {noisy[0]} has level {etas[noisy[0]]}")
    if process.dynamics == "cps" and (max(etas) > 1 or (etas[-1] and not schedule.sigmas[-1])):
        raise SpecError("the dynamics 'cps' takes levels up to 1, and none for a last step that ends at the data")
    return noisy


def check_prompts(prompts: FlowPrompts, samples: int) -> None:
    """Refuses prompts that cannot be drawn for.

    Raises:
        DataError: there is no prompt or no sample, two share an id, or conditions or masks are of another number.
    """
    ids = prompts.ids.tolist()
    if not ids or samples < 1:
        raise DataError(f"a rollout needs a prompt and a sample of it, received {len(ids)} and {samples}")
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise DataError(f"two prompts have the id {twice} and would be drawn alike; give every prompt its own id")
    require_rows(prompts, len(ids))


def require_rows(value: Any, count: int) -> None:
    """Refuses rows that are not as many as their ids.

    Args:
        value: a tree of tensors [B, ...], such as conditions.
        count: B, the number of ids.

    Raises:
        DataError: names the first tensor of another number of rows.
    """
    for path, leaf in tree.leaves_with_path(value):
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (count,):
            raise DataError(
                f"{path or 'a tensor'} is {received(leaf)}, but there are {count} ids; give a tensor with one row for every id"
            )
