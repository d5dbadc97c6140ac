"""Numbers that no run could work with, where a field alone cannot say so: decided before a file is opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areno_fn.contracts.spec import FlowGrouped, FlowTaught, Levels, Phase, Repeated, RunSpec, Sampled
from areno_fn.engine.specfile.types import Path, locate, plain_copy

MOST_HELD = 1_048_576
"""Samples or pictures that one step holds in memory at most."""
MOST_TOKENS = 1_000_000_000
"""Tokens that one step draws at most."""
MOST_UPDATES = 100_000
"""Updates that one step makes at most."""
_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_MIN = 1.1754943508222875e-38
_LOWEST_SHIFT = 1e-3


def size_problems(spec: RunSpec) -> Iterator[str]:
    """A sentence for all that is more than memory or time hold, and for levels that are none."""
    for phase in spec.phases:
        yield from _held(phase, f"phases.{phase.name}")
        yield from _shifts(phase, f"phases.{phase.name}")
    if spec.evaluation is not None:
        yield from _shift(spec.evaluation.denoising, "evaluation.denoising")


def range_problems(spec: RunSpec) -> Iterator[str]:
    """A sentence for every number that 32 bits do not hold."""
    plain = plain_copy(spec)
    for path, number in _floats(plain, ()):
        if abs(number) > _FLOAT32_MAX:
            yield f"{locate(plain, path)[0]}: {number} is beyond the largest number of 32 bits, about {_FLOAT32_MAX:.1e}"
        elif 0 < abs(number) < _FLOAT32_MIN:
            yield (
                f"{locate(plain, path)[0]}: {number} is nearer to 0 than the smallest number of 32 bits, about "
                f"{_FLOAT32_MIN:.1e}, and would be taken for 0"
            )


def vocabulary_problems(spec: RunSpec, vocab_size: int) -> Iterator[str]:
    """A sentence for every `top_k` that leaves nothing out.

    Args:
        vocab_size: how many tokens the model can draw.
    """
    drawn = [
        (f"phases.{phase.name}.algorithm", phase.algorithm.sampling)
        for phase in spec.phases
        if isinstance(phase.algorithm, Sampled)
    ]
    drawn += [("evaluation", spec.evaluation.sampling)] if spec.evaluation is not None else []
    for where, sampling in drawn:
        if sampling.top_k > vocab_size:
            yield (
                f"{where}.sampling.top_k: the model has {vocab_size} tokens, of which the best {sampling.top_k} are all; lower "
                f"it, or use 0 for all"
            )


def _floats(value: Any, path: Path) -> Iterator[tuple[Path, float]]:
    if isinstance(value, float):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _floats(item, (*path, key))


def _held(phase: Phase, where: str) -> Iterator[str]:
    """What a step holds is the product of several fields."""
    algorithm, rows = phase.algorithm, phase.batch.rows
    samples = algorithm.samples if isinstance(algorithm, Sampled | FlowGrouped | FlowTaught) else 1
    terms = getattr(algorithm, "terms", 1)
    field = "samples" if samples > 1 else "terms"
    if rows * samples * terms > MOST_HELD:
        each = " x ".join(f"{count:,} {name}" for count, name in ((samples, "samples"), (terms, "terms")) if count > 1)
        yield (
            f"{where}.algorithm.{field}: {rows:,} rows x {each} are {rows * samples * terms:,} in one step, and at most "
            f"{MOST_HELD:,} are held at once; lower it, or batch.rows"
        )
    if isinstance(algorithm, Sampled) and rows * samples * algorithm.sampling.max_tokens > MOST_TOKENS:
        yield (
            f"{where}.algorithm.sampling.max_tokens: {algorithm.sampling.max_tokens:,} for each of {rows:,} rows x {samples:,} "
            f"samples are more than the {MOST_TOKENS:,} tokens that a step may draw; lower it, samples or batch.rows"
        )
    if isinstance(algorithm, Repeated) and algorithm.epochs * algorithm.minibatches > MOST_UPDATES:
        yield (
            f"{where}.algorithm.epochs: {algorithm.epochs:,} x {algorithm.minibatches:,} mini-batches are more than the "
            f"{MOST_UPDATES:,} updates that a step may make; lower it, or minibatches"
        )


def _shifts(phase: Phase, where: str) -> Iterator[str]:
    if phase.denoising is not None:
        yield from _shift(phase.denoising, f"{where}.denoising")
    drawn = getattr(phase.algorithm, "denoising", None)
    if isinstance(drawn, Levels):
        yield from _shift(drawn, f"{where}.algorithm.denoising")


def _shift(levels: Levels, where: str) -> Iterator[str]:
    if 0 < levels.shift < _LOWEST_SHIFT:
        yield (
            f"{where}.shift: a shift of {levels.shift:g} leaves no noise in any step; use at least {_LOWEST_SHIFT:g}, or 0 for "
            f"the model's own"
        )
