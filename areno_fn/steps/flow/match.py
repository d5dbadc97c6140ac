"""Distribution matching: steps of a generator's own rollout, replayed, noised, and shown to judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Trajectory
from areno_fn.contracts.flow_batch import Noised
from areno_fn.contracts.flow_match import Judges, Matched, Replay
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.guidance import guided
from areno_fn.steps.flow.latents import along, live, over_latent
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.path import noised_to
from areno_fn.steps.flow.schedule import intervals, places
from areno_fn.steps.flow.times import Times, times_between
from areno_fn.steps.flow.transition import clean_of, noise_of
from areno_fn.steps.reduce import wide

LOG_LARGEST_IMPORTANCE = math.log(20)

QUERIES = ("anywhere", "interval", "above")


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
    if query not in QUERIES:
        raise SpecError(f"query {query!r} does not exist; choose one of {', '.join(QUERIES)}")
    process = trajectory.process
    if process.dynamics != "ode" or process.solver != "euler":
        raise SpecError(
            f"steps are replayed on a rollout of the ODE by Euler's method, "
            f"received one of {process.dynamics!r} by {process.solver!r}"
        )
    ids, schedule = trajectory.ids, trajectory.schedule
    batches = []
    for step in places(steps, schedule.steps):
        stream = key.fold(step)
        at = intervals(schedule, trajectory.levels, torch.full_like(ids, step))
        sigma, after = at.sigma, at.next_sigma
        low, high = torch.full_like(sigma, times.low), torch.full_like(sigma, times.high)
        if query != "anywhere":
            low, high = after, sigma if query == "interval" else high
        state = trajectory.state(step)
        batches.append(
            Replay(
                state=state,
                sigma=sigma,
                timestep=at.timestep,
                middle=torch.zeros_like(sigma) if query == "anywhere" else after,
                level=times_between(times, stream.fold("level"), ids, low, high),
                noise=latent_noise(stream.fold("noise"), ids, tuple(state.shape[1:])),
                conditions=trajectory.conditions,
                weight=torch.ones_like(sigma),
                mask=trajectory.mask,
                guidance=process.guidance,
                real_guidance=real_guidance,
            )
        )
    return tuple(batches)


def replayed(policy: FlowPolicy, params: Any, batch: Replay) -> tuple[torch.Tensor, torch.Tensor]:
    """The clean latents that the generator sees in its states, and the noise that this implies, [M, *] each."""
    ask = guided(policy, batch.guidance)
    velocity = ask(params, batch.state, batch.timestep, batch.conditions)
    return clean_of(batch.state, velocity, batch.sigma), noise_of(batch.state, velocity, batch.sigma)


def mixed_noise(implied: torch.Tensor, batch: Replay) -> torch.Tensor:
    r"""Noise of unit variance that carries a state from `middle` on to `level`, [M, *].

    With alpha = 1 - sigma and c = alpha_level / alpha_middle sigma_middle, noise c implied + b fresh with
    b^2 = sigma_level^2 - c^2, over sigma_level: as if noise had been added to the state at `middle`. At middle 0 it is
    the fresh noise.
    """
    kept = (1 - batch.level) / (1 - batch.middle) * batch.middle
    fresh = (batch.level.square() - kept.square()).clamp(min=0).sqrt()
    total = along(kept, implied) * implied + along(fresh, implied) * wide(batch.noise)
    return total / along(batch.level, implied)


def match(policy: FlowPolicy, *, rewards: bool = False) -> Callable[[Judges, Replay], Matched]:
    """The stage `(Judges, Replay) -> Matched`: the generator's clean latents, noised as data and shown to the judges.

    Args:
        policy: the model of all roles.
        rewards: the teacher is asked without guidance too, and the surrogate with it, for `rewarded_matching`.
    """

    def stage(params: Judges, batch: Replay) -> Matched:
        generated, implied = replayed(policy, params.generator, batch)
        shown = _shown(generated, mixed_noise(implied, batch), batch)

        def seen_by(judge: Any, guidance: float) -> torch.Tensor:
            with torch.no_grad():
                velocity = guided(policy, guidance)(judge, shown.state, shown.timestep, shown.conditions)
                return clean_of(shown.state, velocity, shown.sigma).detach()

        surrogate = params.surrogate if rewards else None
        return Matched(
            generated=generated,
            real=seen_by(params.real, batch.real_guidance),
            fake=seen_by(params.fake, 1.0),
            plain=seen_by(params.real, 1.0) if rewards and batch.real_guidance > 1 else None,
            surrogate=None if surrogate is None else seen_by(surrogate, batch.real_guidance),
            weight=batch.weight,
            mask=batch.mask,
            real_guidance=batch.real_guidance,
        )

    return stage


def followed(policy: FlowPolicy, generator: Any, batch: Replay) -> Noised:
    """What the fake model is trained on: the generator's clean latents as data, noised as the judges are shown them.

    The factor is exp(-mean mixed^2 / 2 + mean fresh^2 / 2), within [1/20, 20]: how much likelier the mixed noise is than
    the fresh. It is 1 where all noise is fresh.
    """
    with torch.no_grad():
        generated, implied = replayed(policy, generator, batch)
        mixed = mixed_noise(implied, batch)
        exponent = 0.5 * (over_latent(batch.noise.square(), batch.mask) - over_latent(mixed.square(), batch.mask))
        factor = exponent.clamp(-LOG_LARGEST_IMPORTANCE, LOG_LARGEST_IMPORTANCE).exp()
        return replace(_shown(generated, mixed, batch), factor=factor)


def _shown(generated: torch.Tensor, noise: torch.Tensor, batch: Replay) -> Noised:
    return noised_to(
        live(generated.detach(), batch.mask),
        noise.detach(),
        batch.level,
        batch.conditions,
        weight=batch.weight,
        mask=batch.mask,
    )
