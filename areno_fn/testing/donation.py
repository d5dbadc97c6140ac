"""The law of steps that are given their state for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areno_fn import tree
from areno_fn.contracts.errors import DonatedError
from areno_fn.contracts.record import field_names
from areno_fn.contracts.state import TrainState
from areno_fn.testing.purity import copied

Step = Callable[[TrainState, Any], tuple[TrainState, Mapping[str, Any]]]


def donation_agrees(pure: Step, donated: Step, state: TrainState, batches: Sequence[Any]) -> TrainState:
    """A step that is given its state for good is the pure one, bit for bit, and the state it was given is gone.

    Both make a step for every batch. States and metrics are the same after each, the donated state cannot be read, and
    nothing is written to a batch, to other roles or to snapshots.

        laws.donation_agrees(train_step(objective, optimizer), train_step(objective, optimizer, donate=True), state, [(packed,)])

    Args:
        pure: `(state, batch) -> (state, metrics)`.
        donated: the same, which may write to its state.
        state: where both begin; copies are made of it.
        batches: one for every step.

    Returns:
        The last state.

    Raises:
        AssertionError: names the step, and the path where there is one.
        ValueError: there is no batch.
    """
    if not batches:
        raise ValueError("donation_agrees was given no batch; give one for every step that is to be made")
    want, got = copied(state), copied(state)
    for number, batch in enumerate(batches):
        given, kept, record = copied(batch), copied(got.snapshots), got
        others = {name: own for name, own in got.params.items() if got.optim.get(name) is None}
        frozen = copied(others)
        want, told = pure(want, copied(batch))
        got, also = donated(got, given)
        _require_same(want, got, f"after step {number} the states differ")
        _require_same(dict(told), dict(also), f"in step {number} the metrics differ")
        _require_same(batch, given, f"step {number} wrote to its batch")
        _require_same(frozen, others, f"step {number} wrote to a frozen role")
        _require_same(kept, _of(got, kept), f"step {number} changed snapshots")
        _require_gone(record, number)
    return got


def _of(state: TrainState, kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state.snapshots[name] for name in kept if name in state.snapshots}


def _require_same(one: Any, other: Any, what: str) -> None:
    difference = tree.first_difference(one, other)
    if difference is not None:
        raise AssertionError(f"{what} at {difference}")


def _require_gone(state: TrainState, number: int) -> None:
    """A donated state answers to nothing, or its reader would find the numbers of another step."""
    for name in field_names(state):
        try:
            getattr(state, name)
        except DonatedError:
            continue
        raise AssertionError(
            f"the state that was given to step {number} can still be read at {name}; begin the step with state = donate(state)"
        )
