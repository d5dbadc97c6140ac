"""Distribution matching: DMD2, TDM, and the generator of TDM-R1. Each turns directions into a regression target."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow_match import Matched
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.latents import along, over_latent
from areno_fn.steps.flow.objectives.terms import mean_of_rows
from areno_fn.steps.reduce import mean_of, wide

SMALLEST_SCALE = 1e-6


def dmd2() -> Callable[[Matched], Sums]:
    r"""The stage `Matched -> Sums` of DMD2 (arXiv 2405.14867), without its adversarial and regression terms.

    With direction = (fake - real) / mean |generated - real|, the divisor at least 1e-6, all data, the loss of a row is

        1/2 mean (generated - sg(generated - direction))^2

    whose gradient in the generated latent is the direction over the number of elements: 0 where fake is real.
    """

    def stage(found: Matched) -> Sums:
        now = _counted(found)
        scale = _scale(now, now.real)
        direction = (now.real - now.fake) / along(scale, now.real)
        values = over_latent(0.5 * _offset(now.generated, direction).square(), now.mask)
        return _sums(values, now)

    return stage


@checked
def trajectory_matching(*, huber: float = 1e-3) -> Callable[[Matched], Sums]:
    r"""The stage `Matched -> Sums` of the generator of TDM (arXiv 2503.06674).

    With delta = generated - sg(generated + real - fake) and c = `huber`, the loss of a row is
    mean (sqrt(delta^2 + c^2) - c) / mean |generated - real|, the divisor data and at least 1e-6.

    Args:
        huber: c; 0 for mean delta^2 / 2.

    Raises:
        SpecError: it is negative.
    """
    _check_huber(huber)

    def stage(found: Matched) -> Sums:
        now = _counted(found)
        return _sums(_revised(now, now.real - now.fake, now.real, huber), now)

    return stage


@checked
def rewarded_matching(
    *, mixture: float = 0.3, guidance_reward: float = 4.5, huber: float = 1e-3
) -> Callable[[Matched], Sums]:
    r"""The stage `Matched -> Sums` of the generator of TDM-R1 (arXiv 2603.07700).

    The loss of `trajectory_matching`, plus `mixture` times the same loss along the teacher's guidance,
    guidance_reward / (s - 1) (real - plain), scaled by |generated - real|, plus (1 - mixture) times the same along what
    the surrogate has learned, surrogate - real, scaled by |generated - surrogate|. A teacher without guidance, s = 1,
    has no guidance to follow.

    Args:
        mixture: share of the guidance among both rewards.
        guidance_reward: scale of the guidance's direction; 0 leaves it out.
        huber: as in `trajectory_matching`.

    Raises:
        SpecError: a number is out of range.
    """
    _check_huber(huber)
    if not (0 <= mixture <= 1 and 0 <= guidance_reward < math.inf):
        raise SpecError(
            f"rewarded_matching needs 0 <= mixture <= 1 and a finite guidance_reward >= 0, received {mixture} and {guidance_reward}"
        )

    def stage(found: Matched) -> Sums:
        now = _counted(found)
        if now.surrogate is None:
            raise RecordError("rewarded_matching needs Matched.surrogate, which is None; give the Judges a surrogate")
        values = _revised(now, now.real - now.fake, now.real, huber)
        learned = _revised(now, now.surrogate - now.real, now.surrogate, huber)
        values = values + (1 - mixture) * learned
        if now.real_guidance > 1 and guidance_reward:
            if now.plain is None:
                raise RecordError("rewarded_matching needs Matched.plain for a guided teacher; ask match() for it")
            scale = guidance_reward / (now.real_guidance - 1)
            values = values + mixture * _revised(now, scale * (now.real - now.plain), now.real, huber)
        return _sums(values, now)

    return stage


def _revised(now: Matched, direction: torch.Tensor, anchor: torch.Tensor, huber: float) -> torch.Tensor:
    """The loss [M] of moving what was generated along a direction."""
    delta = _offset(now.generated, direction)
    bent = (delta.square() + huber**2).sqrt() - huber if huber else 0.5 * delta.square()
    return over_latent(bent, now.mask) / _scale(now, anchor)


def _offset(generated: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """The generated latents minus the data generated + direction: -direction, with the gradient of the first."""
    return generated - generated.detach() - direction


def _scale(now: Matched, anchor: torch.Tensor) -> torch.Tensor:
    return over_latent((now.generated.detach() - anchor).abs(), now.mask).clamp(min=SMALLEST_SCALE)


def _sums(values: torch.Tensor, now: Matched) -> Sums:
    total, weight = mean_of_rows(values, now.weight)
    gap = over_latent((now.real - now.fake).square(), now.mask)
    return Sums(total=total, weight=weight, stats={"flow/gap": mean_of(gap, now.weight)}, peaks={})


def _counted(found: Matched) -> Matched:
    """The record with 0 in place of what does not count."""
    for name in ("real", "fake", "plain", "surrogate"):
        value = getattr(found, name)
        if value is not None and value.requires_grad:
            raise RecordError(f"Matched.{name} carries a gradient; the judges are frozen while the generator moves")
    alive = along(found.weight, found.generated) != 0
    if found.mask is not None:
        alive = alive & found.mask
    names = [n for n in ("generated", "real", "fake", "plain", "surrogate") if getattr(found, n) is not None]
    return replace(found, **{name: torch.where(alive, wide(getattr(found, name)), 0.0) for name in names})


def _check_huber(huber: float) -> None:
    if not 0 <= huber < math.inf:
        raise SpecError(f"huber must be finite and at least 0, where 0 means half the square, received {huber}")
