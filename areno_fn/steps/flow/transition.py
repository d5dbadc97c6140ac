"""One denoising step: four dynamics, one Gaussian, and the log-probability of what was drawn from it.

Sources: Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), coefficients-preserving sampling (2509.05952).
"""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow import Dynamics, Interval, Likelihood, Over, Transition
from areno_fn.steps.flow.latents import along, live, over_latent
from areno_fn.steps.reduce import wide

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def clean_of(state: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The clean latent that a velocity points away from, x - sigma v, [B, *]."""
    return wide(state) - along(sigma, state) * wide(velocity)


def noise_of(state: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The noise that a velocity points to, x + (1 - sigma) v, [B, *]."""
    return wide(state) + (1 - along(sigma, state)) * wide(velocity)


def transition(state: torch.Tensor, velocity: torch.Tensor, interval: Interval, dynamics: Dynamics) -> Transition:
    r"""The Gaussian of the next state.

    With dt = next - sigma < 0, x1 the predicted noise and x0 the predicted data:

    | dynamics | mean | std |
    | --- | --- | --- |
    | ode | x + v dt | 0 |
    | flow_sde, g = eta sqrt(sigma / (1 - ceiling)) | x + (v + g^2 / (2 sigma) x1) dt | g sqrt(-dt) |
    | dance_sde, g = eta | the same | g sqrt(-dt) |
    | cps | (1 - next) x0 + sqrt(next^2 - std^2) x1 | next sin(eta pi / 2) |

    Every one is the ODE step where eta is 0, exactly. Arithmetic is float32 whatever the model computes in (float64
    for float64 latents).

    Args:
        state, velocity: floating [B, *].
        interval: the levels of every row.
        dynamics: the row of the table.
    """
    x, v = wide(state), wide(velocity)
    step = interval.next_sigma - interval.sigma
    straight = x + v * along(step, x)
    if dynamics == "ode":
        return Transition(mean=straight, std=torch.zeros_like(step), velocity=v, dynamics=dynamics)
    mean, std = _cps(x, v, interval) if dynamics == "cps" else _sde(x, v, interval, dynamics)
    mean = torch.where(along(interval.level, x) == 0, straight, mean)
    return Transition(mean=mean, std=std, velocity=v, dynamics=dynamics)


def draw(now: Transition, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next state mean + std noise, in the dtype it is stored in."""
    return (now.mean + along(now.std, now.mean) * wide(noise)).to(dtype)


def log_prob(
    now: Transition,
    taken: torch.Tensor,
    *,
    over: Over = "mean",
    likelihood: Likelihood = "gaussian",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""The log-probability of a next state, [B]; minus infinity has no gradient, so a step without noise has none.

    Per element, with d = x' - mean, -d^2 / (2 std^2) - log std - log(2 pi) / 2, then the mean or the sum over the
    latent. "unscaled" is -d^2, which published implementations use with CPS.

    Args:
        now: the Gaussian.
        taken: floating [B, *], data.
        over: "mean" or "sum".
        likelihood: "gaussian" or "unscaled".
        mask: bool [B, *], False where a latent is padding.

    Raises:
        RecordError: the dynamics is the ODE, under which no next state has a density.
    """
    if now.dynamics == "ode":
        raise RecordError("a step of the ODE has no log-probability; score steps of flow_sde, dance_sde or cps")
    square = (live(taken, mask).detach() - live(now.mean, mask)).square()
    if likelihood == "unscaled":
        return -over_latent(square, mask, over)
    std = along(now.std, square)
    return over_latent(-square / (2 * std.square()) - torch.log(std) - HALF_LOG_TWO_PI, mask, over)


def entropy(now: Transition) -> torch.Tensor:
    """The entropy of one element of the next state, log std + (1 + log 2 pi) / 2, [B]."""
    return torch.log(now.std) + HALF_LOG_TWO_PI + 0.5


def _sde(x: torch.Tensor, v: torch.Tensor, interval: Interval, dynamics: Dynamics) -> tuple[torch.Tensor, torch.Tensor]:
    step = interval.next_sigma - interval.sigma
    spread = interval.level.square()
    if dynamics == "flow_sde":
        spread = spread * interval.sigma / (1 - interval.ceiling)
    drift = v + along(spread / (2 * interval.sigma), x) * noise_of(x, v, interval.sigma)
    return x + drift * along(step, x), (spread * -step).sqrt()


def _cps(x: torch.Tensor, v: torch.Tensor, interval: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    after = interval.next_sigma
    std = after * torch.sin(interval.level * (math.pi / 2))
    kept = after * torch.cos(interval.level * (math.pi / 2))  # sqrt(next^2 - std^2)
    clean, noise = clean_of(x, v, interval.sigma), noise_of(x, v, interval.sigma)
    return (1 - along(after, x)) * clean + along(kept, x) * noise, std
