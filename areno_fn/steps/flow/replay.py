"""Steps of a generator's own rollout, to be taken again: from which state, and to which levels the result is noised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Trajectory
from areno_fn.contracts.flow_batch import Noised
from areno_fn.contracts.flow_match import Replay
from areno_fn.contracts.key import Key
from areno_fn.steps.flow.latents import along, live
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.schedule import TIMESTEPS, intervals, places
from areno_fn.steps.flow.times import Times, sampled_steps, times_between
from areno_fn.steps.reduce import wide

QUERIES = ("anywhere", "interval", "above")


@checked
def replays(
    trajectory: Trajectory,
    key: Key,
    times: Times,
    *,
    query: str = "anywhere",
    steps: Sequence[int] | None = None,
    real_guidance: float = 1.0,
) -> tuple[Replay, ...]:
    """The steps of an ODE rollout to be taken again, one batch a step, with levels and noise for the judges.

    | query | levels are drawn in | part of the implied noise is kept from |
    | --- | --- | --- |
    | anywhere (DMD2) | the range of `times` | nowhere: all noise is fresh |
    | interval (TDM) | end to beginning of the step | the step's end |
    | above (TDM, "reverse") | the step's end to `times.high` | the step's end |

    Args:
        trajectory: of the generator, with both states of the steps stored.
        key: names the draws.
        times: the distribution of levels.
        query: a row of the table.
        steps: which; all when omitted.
        real_guidance: of the teacher.

    Raises:
        SpecError: there is no such query, or the rollout had noise.
    """
    _check(trajectory, query)
    batches = []
    for step in places(steps, trajectory.schedule.steps):
        every = torch.full_like(trajectory.ids, step)
        batches.append(_replay(trajectory, every, trajectory.state(step), key.fold(step), times, query, real_guidance))
    return tuple(batches)


@checked
def replayed_once(
    trajectory: Trajectory, key: Key, times: Times, *, query: str = "anywhere", real_guidance: float = 1.0
) -> Replay:
    """One step of every row, each with the same probability, as `replays` makes them: as DMD2 trains its generator.

    Args:
        trajectory: of the generator, with all states stored.
        key, times, query, real_guidance: as in `replays`.

    Raises:
        SpecError: as from `replays`.
    """
    _check(trajectory, query)
    candidates = torch.arange(trajectory.schedule.steps, device=trajectory.ids.device)
    # levels are spread over neighbouring rows, and would go with steps that are spread in the same way
    chosen = sampled_steps(key.fold("step"), trajectory.ids, candidates, spread=False)
    states = torch.stack([trajectory.state(step) for step in range(trajectory.schedule.steps)], 1)
    rows = torch.arange(chosen.shape[0], device=chosen.device)
    return _replay(trajectory, chosen, states[rows, chosen], key, times, query, real_guidance)


@checked
def carried(
    trajectory: Trajectory, key: Key, times: Times, *, shared: torch.Tensor, advantage: torch.Tensor
) -> tuple[Noised, ...]:
    r"""The states that the steps of an ODE rollout end in, noised on from there; one batch a step k of T.

    The state that a step ends in still holds noise of the level m. It is carried on to a level above, x = a state + b noise
    with a = (1 - level) / (1 - m) and b^2 = level^2 - (a m)^2, and what is learned from it is the velocity that this
    transition implies, (level noise / b - x) / (1 - level): on average over what may have led to x it is the velocity of
    the states' own process. At m = 0 it is flow matching.

    In the target noise counts c = (level / b - b) / (1 - level), 1 at m = 0 and more above, so that the factor of a row is
    k / (T c^2).

    Args:
        trajectory: with all states stored.
        key: names the draws.
        times: the distribution of levels, which begin the share `times.low` of the way from m to 1 and end at `times.high`.
        shared: int64 [B], rows with one number share level and noise, and are compared with each other.
        advantage: float32 [B].

    Raises:
        SpecError: the rollout had noise.
    """
    _check(trajectory, "above")
    schedule, ids = trajectory.schedule, trajectory.ids
    batches = []
    for step in range(schedule.steps):
        stream = key.fold(step)
        middle = intervals(schedule, trajectory.levels, torch.full_like(ids, step)).next_sigma
        low, high = middle + (1 - middle) * times.low, torch.full_like(middle, times.high)
        level = times_between(times, stream.fold("level"), shared, low, high)
        state = wide(trajectory.state(step + 1))
        noise = live(latent_noise(stream.fold("noise"), shared, tuple(state.shape[1:])), trajectory.mask)
        a = (1 - level) / (1 - middle)
        b = (level.square() - (a * middle).square()).sqrt()
        moved = along(a, state) * state + along(b, state) * noise
        batches.append(
            Noised(
                state=moved,
                target=(along(level / b, state) * noise - moved) / along(1 - level, state),
                sigma=level,
                timestep=level * TIMESTEPS,
                conditions=trajectory.conditions,
                weight=torch.ones_like(level),
                factor=(step + 1) / schedule.steps * ((1 - level) / (level / b - b)).square(),
                advantage=advantage,
                groups=shared,
                mask=trajectory.mask,
            )
        )
    return tuple(batches)


def _check(trajectory: Trajectory, query: str) -> None:
    if query not in QUERIES:
        raise SpecError(f"query {query!r} does not exist; choose one of {', '.join(QUERIES)}")
    process = trajectory.process
    if process.dynamics != "ode" or process.solver != "euler":
        raise SpecError(
            f"steps are replayed on a rollout of the ODE by Euler's method, "
            f"received one of {process.dynamics!r} by {process.solver!r}"
        )


def _replay(
    trajectory: Trajectory,
    steps: torch.Tensor,
    state: torch.Tensor,
    key: Key,
    times: Times,
    query: str,
    real_guidance: float,
) -> Replay:
    """The step of every row, int64 [B], from the state that it began at."""
    ids = trajectory.ids
    at = intervals(trajectory.schedule, trajectory.levels, steps)
    sigma, after = at.sigma, at.next_sigma
    low, high = torch.full_like(sigma, times.low), torch.full_like(sigma, times.high)
    if query != "anywhere":
        low, high = after, sigma if query == "interval" else high
    return Replay(
        state=state,
        sigma=sigma,
        timestep=at.timestep,
        middle=torch.zeros_like(sigma) if query == "anywhere" else after,
        level=times_between(times, key.fold("level"), ids, low, high),
        noise=latent_noise(key.fold("noise"), ids, tuple(state.shape[1:])),
        conditions=trajectory.conditions,
        weight=torch.ones_like(sigma),
        mask=trajectory.mask,
        guidance=trajectory.process.guidance,
        real_guidance=real_guidance,
    )
