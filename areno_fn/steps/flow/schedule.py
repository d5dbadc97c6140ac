"""Noise levels of flow matching, as functions. A shift is applied once, here, and nothing is advanced.

The levels are those of diffusers' FlowMatchEulerDiscreteScheduler: an even grid from 1 down, shifted towards noise by

    shift(u) = s u / (1 + (s - 1) u)

(SD3, arXiv 2403.03206, eq. 23), perhaps stretched to end at a given level, with 0 behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Interval, Schedule
from areno_fn.contracts.record import shown

TIMESTEPS = 1000
TOP = 1 - 1e-5
_MOST_SHOWN = 8

Levels = TypeVar("Levels", float, torch.Tensor)


def shifted(levels: Levels, shift: float) -> Levels:
    """Noise levels moved towards noise by a shift above 1, once; 0 and 1 stay where they are."""
    return shift * levels / (1 + (shift - 1) * levels)


def unshifted(levels: Levels, shift: float) -> Levels:
    """The inverse of `shifted`."""
    return shifted(levels, 1 / shift)


def resolution_shift(
    length: int, *, low: tuple[int, float] = (256, 0.5), high: tuple[int, float] = (4096, 1.15)
) -> float:
    """The shift of an image of `length` latent tokens: e^mu, with mu linear in the length through two points."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return math.exp(low[1] + slope * (length - low[0]))


@checked
def flow_match(
    steps: int, *, shift: float = 1.0, lowest: float | None = None, terminal: float | None = None
) -> Schedule:
    """The schedule of a flow-match Euler loop.

    Args:
        steps: T, how often the model is asked.
        shift: static, or `resolution_shift` of the picture's size.
        lowest: where the even grid ends before it is shifted; 1 / steps when omitted, as Flux, Qwen-Image and
            LTX-2 are sampled. `trained_lowest` gives the end of diffusers' own default, as SD3 is sampled.
        terminal: the last level before 0, to which the shifted grid is stretched; None leaves it.

    Raises:
        SpecError: a number is out of range.
    """
    _check(steps, shift, terminal)
    grid = torch.linspace(1.0, 1 / steps if lowest is None else lowest, steps, dtype=torch.float64)
    levels = shifted(grid, shift)
    if terminal is not None:
        levels = 1 - (1 - levels) * (1 - terminal) / (1 - levels[-1])
    return scheduled(levels)


def trained_lowest(shift: float = 1.0) -> float:
    """The smallest level of a training grid of 1,000 steps, where diffusers ends its default grid.

    With a static shift that grid is a shifted one already. Dynamic shifts leave it at 1 / 1000: omit the shift.
    """
    return shifted(1 / TIMESTEPS, shift)


@checked
def late(schedule: Schedule, strength: float) -> Schedule:
    """The last steps of a schedule, for sampling that begins near given latents: `strength` of them, rounded down.

    Args:
        schedule: T steps.
        strength: share of the steps that are made, above 0 and at most 1, which makes all.

    Raises:
        SpecError: the strength is out of range, or leaves no step.
    """
    left = int(schedule.steps * strength)
    if not 0 < strength <= 1 or not left:
        raise SpecError(
            f"a strength is above 0 and at most 1, and leaves a step of {schedule.steps}, received {strength}"
        )
    return Schedule(sigmas=schedule.sigmas[-left - 1 :], timesteps=schedule.timesteps[-left:])


@checked
def scheduled(levels: torch.Tensor) -> Schedule:
    """The schedule of falling levels [T] above 0 and at most 1; 0 is put behind them.

    Raises:
        SpecError: they are no such levels.
    """
    falling = levels.ndim == 1 and levels.numel() > 0 and bool((levels[1:] < levels[:-1]).all())
    if not falling or not 0 < float(levels[-1]) <= float(levels[0]) <= 1:
        given = levels.tolist() if levels.numel() <= _MOST_SHOWN else shown(levels)
        raise SpecError(f"a schedule has falling noise levels [T], at most 1 and above 0, received {given}")
    sigmas = torch.cat([levels.double(), levels.new_zeros(1, dtype=torch.float64)]).float()
    return Schedule(sigmas=sigmas, timesteps=sigmas[:-1] * TIMESTEPS)


def intervals(schedule: Schedule, levels: torch.Tensor, steps: torch.Tensor) -> Interval:
    """The step of every row.

    The level 1, at which Flow-SDE's noise would be infinite, can only be the first: it is found by its place.

    Args:
        schedule: T steps.
        levels: [T], eta of every step.
        steps: int64 [B], in [0, T), on the device where the step is taken.
    """
    sigmas, levels, timesteps = (x.to(steps.device) for x in (schedule.sigmas, levels, schedule.timesteps))
    begin = sigmas[:-1]
    ceilings = torch.cat([torch.where(begin[:1] > TOP, sigmas[1:2], begin[:1]), begin[1:]])
    return Interval(
        sigma=begin[steps],
        next_sigma=sigmas[1:][steps],
        ceiling=ceilings[steps],
        level=levels[steps],
        timestep=timesteps[steps],
    )


def places(selector: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """Chosen places of a sequence, sorted and each once; negative ones count from the end, and None chooses all.

    Raises:
        SpecError: one is outside.
    """
    if selector is None:
        return tuple(range(length))
    outside = [i for i in selector if not -length <= i < length]
    if outside:
        raise SpecError(f"step {outside[0]} does not exist in a schedule of {length} steps")
    return tuple(sorted({i % length for i in selector}))


def _check(steps: int, shift: float, terminal: float | None) -> None:
    if steps < 1 or not shift > 0:
        raise SpecError(f"a schedule needs steps >= 1 and shift > 0, received steps={steps}, shift={shift}")
    if terminal is not None and not (0 < terminal < 1 and steps > 1):
        raise SpecError(
            f"a schedule is stretched to a terminal level between 0 and 1, in two steps or more, received {terminal}"
        )
