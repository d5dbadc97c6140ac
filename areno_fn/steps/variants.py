"""Variants of parameters. Copies that live beside each other are roles; what a role was, or has been on average, is a
snapshot: a tree of its own that nothing done to its source can change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import replace, shown
from areno_fn.contracts.spec import EMA
from areno_fn.contracts.state import TrainState
from areno_fn.steps.optimizers.master import masters_of
from areno_fn.steps.reduce import wide
from areno_fn.steps.turns import Update

T = TypeVar("T")

AVERAGE = "ema"
"""The snapshot that holds the average of the actor."""
SEEN, UPDATES = "ema_steps", "ema_updates"
"""Controls: optimizer steps since the phase began, and updates of the average since its start."""


def itself(value: T) -> T:
    """The value."""
    return value


def snapshot(params: T) -> T:
    """A copy in memory of its own. Leaves that are one tensor stay one; what is no tensor stays as it is."""
    return _each(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, params)


@attrs.frozen(kw_only=True)
class Shelf:
    """Where a snapshot lies between its uses.

    Attributes:
        put: from parameters to the snapshot that the state keeps.
        take: from that to parameters that can be computed with.
    """

    put: Callable[[Any], Any] = itself
    take: Callable[[Any], Any] = itself


def ema_begin(params: T) -> T:
    """The average of parameters that have not moved yet: a copy in float32, in float64 where they are.

    In bfloat16 an average would stand still: (1 - d) times a small change is below the last place of the average.

    Raises:
        RecordError: a leaf is not of floating-point numbers.
    """
    for path, leaf in tree.leaves_with_path(params):
        if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
            raise RecordError(f"{path} is {shown(leaf)}; only floating-point tensors have an average")
    return _each(lambda leaf: leaf.to(_wider(leaf), copy=True), params)


@checked
def ema_update(average: T, params: T, decay: float) -> T:
    """The next average, s <- d s + (1 - d) p, each product and the sum rounded once.

    0 copies the parameters and 1 returns the average, both bit for bit, whatever they hold.

    Args:
        average: what `ema_begin` or this returned; it is not written to.
        params: the parameters now, of the same structure and shapes.
        decay: d, from 0 to 1.

    Raises:
        RecordError: the decay is no such number, or a leaf of the average is not what `ema_begin` makes of its parameter.
        ValueError: the structures differ.
    """
    if not 0 <= decay <= 1:
        raise RecordError(f"the decay of an average must be from 0 to 1, received {decay}")
    _require_average(average, params)
    if decay == 1:
        return average
    if decay == 0:
        return ema_begin(params)
    return _each(lambda old, new: (old * decay).add_(wide(new) * (1 - decay)), average, params)


def ema_params(average: T, like: Any) -> T:
    """The average in the dtypes of the parameters, each number rounded once.

    Args:
        average: what `ema_update` returned.
        like: the parameters that it is the average of.

    Raises:
        RecordError: a leaf of the average is not what `ema_begin` makes of its parameter.
        ValueError: the structures differ.
    """
    _require_average(average, like)
    return _each(lambda leaf, own: leaf.to(own.dtype), average, like)


def ema_decay(spec: EMA, updates: int) -> float:
    """The decay of the update after so many, n.

        constant  d
        warmup    min(d, (1 + n) / (10 + n))
        linear    d min(1, n / ramp)

    While few updates have been made, the last two forget faster, so that the average soon forgets where it began.
    """
    if spec.schedule == "warmup":
        return min(spec.decay, (1 + updates) / (10 + updates))
    rising = spec.schedule == "linear" and updates < spec.ramp
    return spec.decay * updates / spec.ramp if rising else spec.decay


def averaging(state: TrainState, role: str = "actor", shelf: Shelf = Shelf()) -> TrainState:
    """The state with an average of a role that begins here."""
    average = shelf.put(ema_begin(masters_in(state, role)))
    return replace(
        state,
        snapshots={**state.snapshots, AVERAGE: average},
        controls={**state.controls, SEEN: 0, UPDATES: 0},
    )


def averaged(state: TrainState, spec: EMA, role: str = "actor", shelf: Shelf = Shelf()) -> TrainState:
    """The state with the average one optimizer step further.

    Every `every` steps the average is updated. Updates up to the step `start` copy; what is averaged begins with the last copy.
    """
    seen, updates = int(state.controls[SEEN]) + 1, int(state.controls[UPDATES])
    counted = replace(state, controls={**state.controls, SEEN: seen})
    if seen % spec.every:
        return counted
    decay = ema_decay(spec, updates) if seen > spec.start else 0.0
    moved = shelf.put(ema_update(shelf.take(state.snapshots[AVERAGE]), masters_in(state, role), decay))
    return replace(
        counted,
        snapshots={**state.snapshots, AVERAGE: moved},
        controls={**counted.controls, UPDATES: updates + (seen > spec.start)},
    )


def masters_in(state: TrainState, role: str = "actor") -> Any:
    """What the optimizer of a role moves: float32 masters, where parameters are derived from them."""
    return masters_of(state.params[role], state.optim.get(role))


def followed(update: Update, spec: EMA, role: str = "actor", shelf: Shelf = Shelf()) -> Update:
    """An update of a role, with the role's average behind it."""

    def step(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
        state, metrics = update(state, batches)
        return averaged(state, spec, role, shelf), metrics

    return step


def refreshed(step: Update, every: int, put: Callable[[Any], Any], *, role: str, name: str) -> Update:
    """A step of a phase after which, every so many, a snapshot becomes what its role is then.

    Args:
        step: does not move the cursor, by which steps are counted.
        every: at least 1.
        put: makes the snapshot.
        role, name: whose, and which.
    """

    def following(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        state, metrics = step(state, batch)
        if (state.cursor.step + 1) % every == 0:
            state = replace(state, snapshots={**state.snapshots, name: put(state.params[role])})
        return state, metrics

    return following


def _require_average(average: Any, params: Any) -> None:
    for (path, old), new in zip(tree.leaves_with_path(average), _like(average, params), strict=True):
        if not _averages(old, new):
            raise RecordError(
                f"{path}: the average is {shown(old)} and the parameter {shown(new)}; begin it with ema_begin(params)"
            )


def _averages(old: Any, new: Any) -> bool:
    """Whether one leaf can be the average of another."""
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    return old.shape == new.shape and old.dtype == _wider(new)


def _wider(leaf: torch.Tensor) -> torch.dtype:
    return torch.promote_types(leaf.dtype, torch.float32)


def _like(first: Any, second: Any) -> list[Any]:
    """The leaves of the second tree, which has the structure of the first."""
    try:
        return tree.leaves(tree.map(lambda _, leaf: leaf, first, second))
    except ValueError as error:
        raise RecordError(
            f"the average is not one of these parameters: {error}; begin it with ema_begin(params)"
        ) from error


def _each(function: Callable[..., Any], first: T, *rest: Any) -> T:
    """Maps trees as `tree.map` does, but once for tensors that are there several times."""
    made: dict[tuple[int, ...], Any] = {}

    def one(*leaves: Any) -> Any:
        key = tuple(id(leaf) for leaf in leaves)
        if key not in made:
            made[key] = function(*leaves)
        return made[key]

    return tree.map(one, first, *rest)
