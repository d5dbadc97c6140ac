"""Laws of steps: a step is a function of its arguments, and moves what it says it moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.state import TrainState
from areno_fn.testing.strict import strict


def pure(step: Callable[..., Any], *args: Any) -> Any:
    """A step is a function: it changes none of its arguments, and equal arguments give equal results, bit for bit.

    Runs the step twice in strict mode on copies of the arguments.

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
) -> tuple[TrainState, Mapping[str, Any]]:
    """A whole train step is a function, and moves the roles that it says it moves and nothing else.

    The state and the batch are what they were, equal arguments give equal bits, and global random states are untouched
    (`pure`). Parameters and moments of every other role, the snapshots and the run's key keep their bits; the roles
    that move keep structure, shapes and dtypes; the optimizer's clock advances.

        state, metrics = laws.step_is_pure(train_step(objective, optimizer), state, [packed])

    Args:
        step: `(state, batch) -> (state, metrics)`.
        state: the state before it.
        batch: what it is given.
        moves: the roles that it moves, each of which must change.
        renews: the snapshots that it takes anew, such as an average that follows a role.

    Returns:
        What the step returned.

    Raises:
        AssertionError: names the path.
    """
    after, metrics = pure(step, state, batch)
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
    return after, metrics


def copied(value: Any) -> Any:
    """A tree with copies of its tensors; what was one tensor at two paths is one tensor still."""
    made: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        return made.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf

    return tree.map(copy, value)


def _require_same(before: Mapping[str, Any], after: Mapping[str, Any], path: str, name: str, why: str) -> None:
    if (name in before) != (name in after):
        raise AssertionError(f"{path} {'is gone' if name in before else 'is new'} after the step; {why}")
    difference = tree.first_difference(before[name], after[name]) if name in before else None
    if difference is not None:
        raise AssertionError(f"{path}.{difference} after the step; {why}")


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
