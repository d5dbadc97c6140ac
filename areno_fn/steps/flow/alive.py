"""Rows that count: what stands in a row of weight 0 is replaced before a model is asked about it.

A model mixes no rows, but the gradient of its parameters is a sum over rows, in which 0 times NaN is NaN. So the
numbers of a row that does not count must not reach it. Rows that count keep their bits.
"""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.calls import require_given
from areno_fn.contracts.flow import Conditions, Interval, Transition
from areno_fn.contracts.flow_batch import Denoising, Moves, Noised
from areno_fn.contracts.flow_match import Replay
from areno_fn.contracts.record import replace

LEVEL, NEXT, ETA, TIMESTEP = 0.75, 0.5, 0.5, 750.0
"""The step of a row that does not count: one at which every dynamics is finite."""


def counted(rows: torch.Tensor, weight: torch.Tensor, instead: float = 0.0) -> torch.Tensor:
    """Rows [M, *] in their dtype, with a number in place of those whose weight [M] is 0; whole numbers stay."""
    if not rows.is_floating_point():
        return rows
    return torch.where((weight != 0).reshape(-1, *[1] * (rows.ndim - 1)), rows, instead)


def counted_noised(batch: Noised) -> Noised:
    """Noised samples, safe to show to a model.

    Raises:
        RecordError: they are none.
    """
    require_given("a model predicts the velocities of", batch, Noised, "noised(...)")
    return replace(batch, **_seen(batch, "state", "target", "old", "reference", "average", "factor", "advantage"))


def counted_steps(batch: Denoising) -> Denoising:
    """Recorded steps, safe to show to a model and to score.

    Raises:
        RecordError: they are none.
    """
    require_given("a model scores the steps of", batch, Denoising, "denoising(...)")
    weight, at = batch.weight, batch.interval
    interval = Interval(
        sigma=counted(at.sigma, weight, LEVEL),
        next_sigma=counted(at.next_sigma, weight, NEXT),
        ceiling=counted(at.ceiling, weight, LEVEL),
        level=counted(at.level, weight, ETA),
        timestep=counted(at.timestep, weight, TIMESTEP),
    )
    rows = {name: _counted(getattr(batch, name), weight) for name in ("state", "taken", "old", "advantage")}
    told = {name: _transition(getattr(batch, name), weight) for name in ("before", "reference")}
    return replace(batch, interval=interval, conditions=_conditions(batch.conditions, weight), **rows, **told)


def counted_moves(moves: Moves) -> Moves:
    """Steps and the transitions of them, safe to compare; what does not count has no gradient."""
    batch = counted_steps(moves.batch)
    return replace(moves, now=_transition(moves.now, batch.weight), batch=batch)


def counted_replay(batch: Replay) -> Replay:
    """Steps of a generator, safe to take again.

    Raises:
        RecordError: they are none.
    """
    require_given("a model takes again the steps of", batch, Replay, "replays(...)")
    middle, level = counted(batch.middle, batch.weight), counted(batch.level, batch.weight, LEVEL)
    return replace(batch, middle=middle, level=level, **_seen(batch, "state", "noise"))


def _seen(batch: Noised | Replay, *names: str) -> dict[str, Any]:
    """The fields that a model is asked by, and others of a row."""
    return {
        **{name: _counted(getattr(batch, name), batch.weight) for name in names},
        "sigma": counted(batch.sigma, batch.weight, LEVEL),
        "timestep": counted(batch.timestep, batch.weight, TIMESTEP),
        "conditions": _conditions(batch.conditions, batch.weight),
    }


def _conditions(conditions: Conditions, weight: torch.Tensor) -> Conditions:
    kept: Conditions = tree.map(lambda x: counted(x, weight), conditions)
    return kept


def _transition(given: Transition | None, weight: torch.Tensor) -> Transition | None:
    if given is None:
        return None
    return Transition(
        mean=counted(given.mean, weight),
        std=counted(given.std, weight, 1.0),
        velocity=counted(given.velocity, weight),
        dynamics=given.dynamics,
    )


def _counted(rows: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    return None if rows is None else counted(rows, weight)
