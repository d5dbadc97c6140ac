"""Losses of rewards over noised samples: DiffusionNFT, AWM, CRD."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow_batch import Noised, Velocities
from areno_fn.steps.flow.latents import along, over_latent
from areno_fn.steps.flow.objectives.terms import (
    bounded_advantage,
    given,
    grouped_sum,
    mean_deviation,
    mean_of_rows,
    seen,
    squared_error,
    summed,
)
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.reduce import divide, mean_of

AWM_WEIGHTINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "uniform": lambda error, sigma: error,
    "sigma": lambda error, sigma: sigma * error,
    "square": lambda error, sigma: sigma.square() * error,
    "huber": lambda error, sigma: (torch.sqrt(error + 1e-10) - 1e-5) * sigma,
    "ghuber": lambda error, sigma: ((error.double() + 1e-10) ** 0.25 - 1e-10**0.25).to(error.dtype) * sigma / 0.25,
}
"""What stands for minus a log-probability, by the mean squared velocity error and the level."""


@checked
def diffusion_nft(
    beta: float = 1.0, *, max_advantage: float = 5.0, adaptive: bool = True, kl_coef: float = 0.0
) -> Callable[[Velocities], Sums]:
    r"""The stage `Velocities -> Sums` of DiffusionNFT (arXiv 2509.16117).

    With r = clip(1/2 + A / (2 max_advantage), 0, 1), v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, and
    x0+, x0- the clean latents that these velocities point away from,

        max_advantage / beta (r mean (x0+ - x0)^2 / w+ + (1 - r) mean (x0- - x0)^2 / w-) + kl_coef mean (v - v_ref)^2

    where w+ = mean |x0+ - x0| is data, at least 1e-5. At v = v_old the value does not depend on r, but the gradient is
    proportional to (2 r - 1)(v - v*), the same for every beta.

    Args:
        beta: how far v+ and v- lie from v_old. Recipes with .1 converge faster.
        max_advantage: advantages are clipped to it.
        adaptive: divides by w+ and w-; without, as in the plain formula, by 1.
        kl_coef: weight of the distance from the reference.

    Raises:
        SpecError: a number is out of range.
    """
    _check("diffusion_nft", beta=beta, max_advantage=max_advantage)

    def stage(found: Velocities) -> Sums:
        now = seen(found, "diffusion_nft", "old", "advantage", *_kl(kl_coef))
        batch, v = now.batch, now.velocity
        old, share = given(batch.old), _share(batch, max_advantage)
        towards = _clean_error(beta * v + (1 - beta) * old, batch, adaptive)
        away = _clean_error((1 + beta) * old - beta * v, batch, adaptive)
        loss = (share * towards + (1 - share) * away) * (max_advantage / beta)
        return summed(loss, batch, penalties=((kl_coef, batch.reference),), velocity=v)

    return stage


@checked
def advantage_weighted(
    weighting: str = "uniform",
    low: float = 1e-4,
    high: float = 1e-4,
    *,
    max_advantage: float = 5.0,
    kl_coef: float = 0.0,
    average_kl_coef: float = 0.0,
) -> Callable[[Velocities], Sums]:
    r"""The stage `Velocities -> Sums` of AWM (arXiv 2509.25050): `clipped`, with minus a velocity error as log-probability.

    With l = mean (v - (eps - x0))^2 and l_old the same of the policy that sampled, at the same level and noise, the
    ratio is exp(w(l_old) - w(l)).

    | weighting | w |
    | --- | --- |
    | uniform, sigma, square | l, sigma l, sigma^2 l |
    | huber | (sqrt(l + 1e-10) - 1e-5) sigma |
    | ghuber, p = 1/4 | ((l + 1e-10)^p - 1e-10^p) sigma / p |

    Args:
        weighting: a key of `AWM_WEIGHTINGS`.
        low, high: bounds of the ratio; recipes take 1 as well as 1e-4.
        max_advantage: advantages are clipped to it.
        kl_coef: weight of the squared distance from the reference's velocity.
        average_kl_coef: of that from the running average's.

    Raises:
        SpecError: there is no such weighting, or a number is out of range.
    """
    if weighting not in AWM_WEIGHTINGS:
        raise SpecError(f"weighting {weighting!r} does not exist; choose one of {', '.join(AWM_WEIGHTINGS)}")
    _check("advantage_weighted", max_advantage=max_advantage)
    surrogate = clipped(low, high)

    def stage(found: Velocities) -> Sums:
        average = ("average",) if average_kl_coef else ()
        now = seen(found, "advantage_weighted", "old", "advantage", *_kl(kl_coef), *average)
        batch, weigh = now.batch, AWM_WEIGHTINGS[weighting]
        sigma = batch.sigma.to(now.velocity.dtype)
        actions = Actions(
            logp=-weigh(squared_error(now.velocity, batch.target, batch.mask), sigma),
            old=-weigh(squared_error(given(batch.old), batch.target, batch.mask), sigma),
            advantage=_scaled(bounded_advantage(given(batch.advantage), max_advantage), batch),
            weight=batch.weight,
            segments=torch.arange(batch.weight.shape[0], device=batch.weight.device),
            entropy=torch.zeros_like(batch.weight),
            documents=batch.weight.shape[0],
        )
        policy = surrogate(actions)
        distances = summed(
            torch.zeros_like(actions.logp),
            batch,
            penalties=((kl_coef, batch.reference), (average_kl_coef, batch.average)),
            velocity=now.velocity,
        )
        stats = {name: value for name, value in policy.stats.items() if name != "entropy"}
        return Sums(
            total=policy.total + distances.total,
            weight=policy.weight,
            stats=stats | distances.stats,
            peaks=policy.peaks,
        )

    return stage


@checked
def centred_reward(
    beta: float = 1.0,
    *,
    loss: str = "mse",
    temperature: float = -1.0,
    adaptive: bool = True,
    max_advantage: float = 5.0,
    kl_coef: float = 0.0,
    kl_floor: float | None = None,
) -> Callable[[Velocities], Sums]:
    r"""The stage `Velocities -> Sums` of CRD, centred reward distillation (arXiv 2603.14128).

    The implicit reward r = -(mean (v - v*)^2 / w - mean (v_old - v*)^2 / w_old) is to differ within a group as the reward
    a = clip(1/2 + A / (2 max_advantage), 0, 1) does. With r' and a' weighted means of the group, r' data,

        mse:  max_advantage / beta (beta (r - r') - (a - a'))^2
        bce:  max_advantage / beta BCE(sigmoid(beta (r - r')), sigmoid(a - a'))

    The weights are equal for a negative temperature. Otherwise the loss is the mean of two, one with weights
    softmax(a / t), one with softmax(-a / t); at t = 0 these are softmax(a) over the rows of positive advantage and over
    those of negative, or equal weights where there are none. All rows of a group must be in one micro-batch.

    Args:
        beta: scale of the implicit reward.
        loss: "mse" or "bce".
        temperature: of the weights.
        adaptive: w = mean |v - v*|, data, at least 1e-5, and w_old likewise; without, 1.
        max_advantage: advantages are clipped to it.
        kl_coef: weight of the squared distance from the reference's velocity.
        kl_floor: makes the coefficient of a row kl_floor + a (kl_coef - kl_floor); None leaves kl_coef for all.

    Raises:
        SpecError: a number is out of range, or there is no such loss.
    """
    if loss not in ("mse", "bce"):
        raise SpecError(f"loss {loss!r} does not exist; choose one of mse, bce")
    _check("centred_reward", beta=beta, max_advantage=max_advantage)

    def stage(found: Velocities) -> Sums:
        now = seen(found, "centred_reward", "old", "advantage", "groups", *_kl(kl_coef))
        batch, v = now.batch, now.velocity
        reward = _velocity_error(given(batch.old), batch, adaptive).detach() - _velocity_error(v, batch, adaptive)
        wanted = _share(batch, max_advantage)
        directions = []
        for weights in _centres(wanted, batch, temperature):
            implicit = beta * (reward - _centre(reward.detach(), weights, batch))
            explicit = wanted - _centre(wanted, weights, batch)
            if loss == "mse":
                directions.append((implicit - explicit).square())
            else:
                odds = torch.sigmoid(explicit)
                directions.append(F.binary_cross_entropy_with_logits(implicit, odds, reduction="none"))
        values = torch.stack(directions).mean(0) * (max_advantage / beta)
        stats = {"flow/reward": mean_of(reward, batch.weight)}
        sums = summed(values, batch, stats=stats, velocity=v)
        if not kl_coef:
            return sums
        coefficient = kl_coef if kl_floor is None else kl_floor + wanted * (kl_coef - kl_floor)
        distance = coefficient * squared_error(v, given(batch.reference), batch.mask)
        total = sums.total + mean_of_rows(distance, batch.weight)[0]
        return Sums(total=total, weight=sums.weight, stats=sums.stats, peaks={})

    return stage


def _clean_error(velocity: torch.Tensor, batch: Noised, adaptive: bool) -> torch.Tensor:
    """The error of the clean latent that a velocity points away from: x0' - x0 = sigma (v* - v), [M]."""
    difference = along(batch.sigma, velocity) * (velocity - batch.target)
    error = over_latent(difference.square(), batch.mask)
    return error / mean_deviation(difference, torch.zeros_like(difference), batch.mask) if adaptive else error


def _velocity_error(velocity: torch.Tensor, batch: Noised, adaptive: bool) -> torch.Tensor:
    error = squared_error(velocity, batch.target, batch.mask)
    return error / mean_deviation(velocity, batch.target, batch.mask) if adaptive else error


def _share(batch: Noised, largest: float) -> torch.Tensor:
    """Advantages as numbers from 0 to 1."""
    return (0.5 + bounded_advantage(given(batch.advantage), largest) / (2 * largest)).clamp(0, 1)


def _centres(wanted: torch.Tensor, batch: Noised, temperature: float) -> list[torch.Tensor]:
    """Weights [M] within every group, not yet divided by their sum; one for each direction."""
    alive = (batch.weight != 0).to(wanted.dtype)
    if temperature < 0:
        return [alive]
    if temperature:
        return [alive * torch.exp(sign * (wanted - 0.5) / temperature) for sign in (1, -1)]
    weights = []
    for pool in (given(batch.advantage) > 0, given(batch.advantage) < 0):
        chosen = alive * torch.where(pool, torch.exp(wanted), 0.0)
        empty = grouped_sum(chosen, given(batch.groups))[0] == 0
        weights.append(torch.where(empty, alive, chosen))
    return weights


def _centre(values: torch.Tensor, weights: torch.Tensor, batch: Noised) -> torch.Tensor:
    groups = given(batch.groups)
    return divide(grouped_sum(weights * values, groups)[0], grouped_sum(weights, groups)[0])


def _scaled(advantage: torch.Tensor, batch: Noised) -> torch.Tensor:
    # the surrogate is homogeneous in the advantage, so a positive factor of the loss is one of the advantage
    return advantage if batch.factor is None else advantage * batch.factor


def _kl(coefficient: float) -> tuple[str, ...]:
    return ("reference",) if coefficient else ()


def _check(who: str, **positive: float) -> None:
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise SpecError(f"{who} needs a finite {name} > 0, received {value}")
