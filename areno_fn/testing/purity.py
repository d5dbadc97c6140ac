"""Laws of steps: a step is a function of its arguments, and moves what it says it moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from areno_fn import tree
from areno_fn.contracts.state import TrainState
from areno_fn.testing.strict import strict


def pure(step: Callable[..., Any], *args: Any) -> Any:
    """A step is a function: it changes none of its arguments, and equal arguments give equal results, bit for bit.

    Runs the step twice in strict mode on copies of the arguments: of tensors, arrays of numpy, containers and records.

    Args:
        step: any function of trees.
        args: its arguments.

    Returns:
        What the step returned.

    Raises:
        AssertionError: an argument was written in place, two calls differ, or global randomness was used.
    """
    results = []
    for _ in range(2):
        given = copied(args)
        with strict():
            results.append(step(*given))
        for place, (before, after) in enumerate(zip(args, given, strict=True)):
            difference = tree.first_difference(before, after)
            if difference is not None:
                raise AssertionError(f"the step wrote to its argument {place} at {difference}")
    difference = tree.first_difference(*results)
    if difference is not None:
        raise AssertionError(f"two calls with equal arguments differ at {difference}")
    return results[0]


def step_is_pure(
    step: Callable[[TrainState, Any], tuple[TrainState, Mapping[str, Any]]],
    state: TrainState,
    batch: Any,
    *,
    moves: Collection[str] = ("actor",),
    renews: Collection[str] = (),
    sets: Collection[str] = (),
    advances: bool = False,
) -> tuple[TrainState, Mapping[str, Any]]:
    """A whole train step is a function, and moves the roles that it says it moves and nothing else.

    The state and the batch are what they were, equal arguments give equal bits, and global random states are untouched
    (`pure`). Parameters and moments of every other role, the snapshots, the controls, the cursor and the run's key keep
    their bits; the roles that move keep structure, shapes and dtypes; the optimizer's clock advances, and no clock goes
    back.

        state, metrics = laws.step_is_pure(train_step(objective, optimizer), state, [packed])

    Args:
        step: `(state, batch) -> (state, metrics)`.
        state: the state before it.
        batch: what it is given.
        moves: the roles that it moves, each of which must change.
        renews: the snapshots that it takes anew, such as an average that follows a role.
        sets: the controls that it sets, such as a coefficient that follows what was measured.
        advances: it moves the cursor too, as the steps of `laws.resume_exact` do and those of an algorithm do not.

    Returns:
        What the step returned.

    Raises:
        AssertionError: names the path.
        ValueError: a role, a snapshot or a control is named that is there neither before nor after the step.
    """
    result = pure(step, state, batch)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], TrainState)):
        raise AssertionError(f"the step returned {type(result).__name__}; it must return (state, metrics)")
    after, metrics = result
    moves, renews, sets = _names(moves), _names(renews), _names(sets)
    _require_known("moves", moves, state.params, after.params)
    _require_known("renews", renews, state.snapshots, after.snapshots)
    _require_known("sets", sets, state.controls, after.controls)
    for role in {**state.params, **after.params}:
        if role in moves:
            _require_moved(state, after, role)
        else:
            why = f"the step moves {' and '.join(sorted(moves))} and nothing else"
            _require_same(state.params, after.params, f"params.{role}", role, why)
            _require_same(state.optim, after.optim, f"optim.{role}", role, why)
    for name in {**state.snapshots, **after.snapshots}:
        if name not in renews:
            _require_same(state.snapshots, after.snapshots, f"snapshots.{name}", name, "a snapshot never changes")
    for name in {**state.controls, **after.controls}:
        if name not in sets:
            _require_same(
                state.controls, after.controls, f"controls.{name}", name, "the step does not say that it sets it"
            )
    _require_clocks(state, after, advances)
    return after, metrics


def _require_clocks(state: TrainState, after: TrainState, advances: bool) -> None:
    difference = tree.first_difference(state.key, after.key)
    if difference is not None:
        raise AssertionError(
            f"the step changed key.{difference}; fold clocks into the run's key, which stays what it is"
        )
    if after.counters.optimizer_step <= state.counters.optimizer_step:
        raise AssertionError(
            f"counters.optimizer_step was {state.counters.optimizer_step} and is {after.counters.optimizer_step}; "
            f"a step advances it"
        )
    for name in ("rollout_iteration", "data_epoch"):
        old, new = getattr(state.counters, name), getattr(after.counters, name)
        if new < old:
            raise AssertionError(f"counters.{name} was {old} and is {new}; a clock never goes back")
    difference = tree.first_difference(state.cursor, after.cursor)
    if difference is not None and not advances:
        raise AssertionError(f"the step changed cursor.{difference}; the loop moves it, when the step is done")


def copied(value: Any) -> Any:
    """A tree with copies of its tensors; what was one tensor at two paths is one tensor still."""
    made: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | set | bytearray):
            return leaf.copy()
        return made.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf

    return tree.map(copy, value)


def _names(given: Collection[str]) -> tuple[str, ...]:
    """The names given; a string is one of them."""
    return (given,) if isinstance(given, str) else tuple(given)


def _require_known(what: str, names: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    known = {**before, **after}
    for name in names:
        if name not in known:
            raise ValueError(
                f"{what} names {name!r}, of which the state knows nothing; it has {', '.join(known) or 'none at all'}"
            )


def _require_same(before: Mapping[str, Any], after: Mapping[str, Any], path: str, name: str, why: str) -> None:
    if (name in before) != (name in after):
        raise AssertionError(f"{path} {'is gone' if name in before else 'is new'} after the step; {why}")
    difference = tree.first_difference(before[name], after[name]) if name in before else None
    if difference is not None:
        where = difference.removeprefix("<root>") if difference.startswith("<root>") else f".{difference}"
        raise AssertionError(f"{path}{where} after the step; {why}")


def _require_moved(state: TrainState, after: TrainState, role: str) -> None:
    if role not in state.params or role not in after.params:
        raise AssertionError(f"params.{role} is not there {'before' if role in after.params else 'after'} the step")
    before, moved = state.params[role], after.params[role]
    if tree.equal(before, moved):
        raise AssertionError(f"params.{role} is what it was before the step, which should move it")
    for kind in ("params", "optim"):
        old, new = (_shapes(getattr(one, kind).get(role)) for one in (state, after))
        difference = tree.first_difference(old, new)
        if difference is not None:
            raise AssertionError(f"{kind}.{role}.{difference} after the step; a step keeps shapes and dtypes")


def _shapes(value: Any) -> Any:
    """The same tree with a text for every tensor that says its shape and its dtype."""
    return tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__, value)
