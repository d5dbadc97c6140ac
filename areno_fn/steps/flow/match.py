"""Distribution matching: steps of a generator's own rollout taken again, noised, and shown to judges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from areno_fn.contracts.flow_batch import Noised
from areno_fn.contracts.flow_match import Judges, Matched, Replay
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.alive import counted_replay
from areno_fn.steps.flow.guidance import guided, require_policy
from areno_fn.steps.flow.latents import along, live, over_latent
from areno_fn.steps.flow.path import noised_to
from areno_fn.steps.flow.transition import clean_of, noise_of
from areno_fn.steps.reduce import wide

LOG_LARGEST_IMPORTANCE = math.log(20)


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


def match(
    policy: FlowPolicy, *, real: FlowPolicy | None = None, rewards: bool = False
) -> Callable[[Judges, Replay], Matched]:
    """The stage `(Judges, Replay) -> Matched`: the generator's clean latents, noised as data and shown to the judges.

    Args:
        policy: the model of all roles.
        real: the model of the teacher where it is another one, of latents of the same shape.
        rewards: the teacher is asked without guidance too, and the surrogate with it, for `rewarded_matching`.

    Raises:
        SpecError: one of them is no `FlowPolicy`.
    """
    teacher = policy if real is None else real
    for model in (policy, teacher):
        require_policy(model)

    def stage(params: Judges, batch: Replay) -> Matched:
        batch = counted_replay(batch)
        generated, implied = replayed(policy, params.generator, batch)
        shown = _shown(generated, mixed_noise(implied, batch), batch)

        def seen_by(judge: Any, guidance: float, model: FlowPolicy = policy) -> torch.Tensor:
            with torch.no_grad():
                velocity = guided(model, guidance)(judge, shown.state, shown.timestep, shown.conditions)
                return clean_of(shown.state, velocity, shown.sigma).detach()

        surrogate = params.surrogate if rewards else None
        return Matched(
            generated=generated,
            real=seen_by(params.real, batch.real_guidance, teacher),
            fake=seen_by(params.fake, 1.0),
            plain=seen_by(params.real, 1.0, teacher) if rewards and batch.real_guidance > 1 else None,
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
    batch = counted_replay(batch)
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
