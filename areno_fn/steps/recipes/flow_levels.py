"""The noise levels that a model is trained at, where a part of it stays frozen that is asked at the others."""

from __future__ import annotations

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Schedule
from areno_fn.contracts.flow_adapter import NoiseLevels
from areno_fn.contracts.spec import NoisyDenoising
from areno_fn.steps.flow.schedule import places
from areno_fn.steps.flow.times import share


def trained_levels(own: NoiseLevels, until: float = 1.0) -> tuple[float, float]:
    """The least and the largest level of the part of the way from noise to data at which what is trained is asked.

    Raises:
        SpecError: there is none.
    """
    low, high = share(0.0, until)
    low, high = max(low, own.low), min(high, own.high)
    if low >= high:
        raise SpecError(
            f"algorithm.until: {until:g} of the way from noise to data ends at the level {1 - until:g}, above all levels at which "
            f"what is trained is asked, {_asked(own)}; raise it"
        )
    return low, high


def trained_steps(steps: tuple[int, ...], schedule: Schedule, own: NoiseLevels) -> tuple[int, ...]:
    """Those of some steps at which what is trained is asked.

    Raises:
        SpecError: there is none.
    """
    asked = own.trains_at(schedule.timesteps).tolist()
    found = tuple(step for step in steps if asked[step])
    if not found:
        levels = ", ".join(f"{level:.3g}" for level in schedule.sigmas[:-1].tolist())
        raise SpecError(
            f"algorithm.denoising: what is trained is asked {_asked(own)}, at none of the steps that would be trained on of the "
            f"levels {levels}; take more steps, or train every transformer"
        )
    return found


def noisy_candidates(spec: NoisyDenoising, schedule: Schedule, own: NoiseLevels) -> tuple[int, ...]:
    """The steps of a schedule that may have noise: those that are named, or those but the last that can be learned from.

    Raises:
        SpecError: a named one does not exist or cannot be learned from, or there are fewer than are to have noise.
    """
    if spec.noisy:
        try:
            found = places(spec.noisy, schedule.steps)
        except SpecError as error:
            raise SpecError(f"algorithm.denoising.noisy: {error}; those that are made are counted from 0") from error
        asked = own.trains_at(schedule.timesteps).tolist()
        idle = [step for step in found if not asked[step]]
        if idle:
            raise SpecError(
                f"algorithm.denoising.noisy: step {idle[0]} is at the level {schedule.sigmas[idle[0]]:.3g}, but what is trained is "
                f"asked {_asked(own)}; leave it out"
            )
    elif schedule.steps == 1:
        raise SpecError(
            "algorithm.denoising: one step is made, which is the last and has no noise, and no other is there to train on; take "
            "more steps, or a larger strength"
        )
    else:
        found = trained_steps(tuple(range(schedule.steps - 1)), schedule, own)
    if spec.count > len(found):
        raise SpecError(
            f"algorithm.denoising.count: {spec.count} noisy steps cannot be chosen among {len(found)}; lower it"
        )
    return found


def _asked(own: NoiseLevels) -> str:
    return f"at levels from {own.low:g} to {own.high:g}"
