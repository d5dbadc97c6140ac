"""Learning rates as pure functions of the step. Nothing is advanced, so nothing can be advanced twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import overload

import torch

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import Schedule


class LearningRate:
    """A learning rate as a function of the 1-based step; made by `learning_rate`."""

    def __init__(self, spec: Schedule, base: float, decay_steps: int) -> None:
        self._spec = spec
        self._base = base
        self._decay_steps = decay_steps

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: torch.Tensor) -> torch.Tensor: ...
    def __call__(self, step: int | torch.Tensor) -> float | torch.Tensor:
        """The rate of a step: a float for an integer, float64 [] on the tensor's device for int64 []."""
        if isinstance(step, torch.Tensor):
            return self._at(step.double())
        if step < 1:
            raise SpecError(f"steps are counted from 1, and a schedule was asked for step {step}")
        return float(self._at(torch.tensor(step, dtype=torch.float64)))

    def _at(self, step: torch.Tensor) -> torch.Tensor:
        spec, warmup = self._spec, self._spec.warmup_steps
        start = warmup + (spec.stable_steps if spec.kind == "wsd" else 0)
        progress = ((step - start) / max(self._decay_steps - start, 1)).clamp(0.0, 1.0)
        remaining = _REMAINING[spec.kind](progress)
        decayed = self._base * remaining + spec.min_lr * (1 - remaining)
        return torch.where(step < warmup, self._base * step / max(warmup, 1), decayed)


def learning_rate(spec: Schedule, base: float, total_steps: int) -> LearningRate:
    """The schedule of a specification.

    Step s counts from 1. During warm-up the rate is base s / warmup. Then, with p the progress from the end
    of the warm-up (of the stable part, for "wsd") to `decay_steps`, clipped to [0, 1]:

        constant  base
        linear    min + (base - min) (1 - p)
        cosine    min + (base - min) (1 + cos(pi p)) / 2
        wsd       as linear, after warmup + stable steps

    Args:
        spec: kind and lengths; `decay_steps = 0` stands for `total_steps`.
        base: the rate after warm-up.
        total_steps: optimizer steps of the phase.

    Raises:
        SpecError: the decaying rate would rise, because its minimum lies above its base.
    """
    if spec.kind != "constant" and spec.min_lr > base:
        raise SpecError(
            f"schedule {spec.kind!r} decays from lr={base} to min_lr={spec.min_lr}, which is larger; lower min_lr"
        )
    return LearningRate(spec, base, spec.decay_steps or total_steps)


def _constant(progress: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(progress)


def _linear(progress: torch.Tensor) -> torch.Tensor:
    return 1 - progress


def _cosine(progress: torch.Tensor) -> torch.Tensor:
    return (1 + torch.cos(math.pi * progress)) / 2


_REMAINING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _linear,
}
