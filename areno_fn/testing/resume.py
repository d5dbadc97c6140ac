"""The law of a run that is stopped: saved, loaded and continued it is the run that was never stopped.

from areno_fn.testing import laws
from areno_fn.testing.resume import Run

laws.resume_exact(Run(start=start, batch=batch, step=step, steps=20))
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.ckpt.resume import load_state, save_state
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.roles import RoleLayout
from areno_fn.contracts.state import TrainState
from areno_fn.testing.sizes import require_some

_IDENTITY = RunIdentity(family="", model="", phases="", data="", parameters="", optimizers="", seed=0)


@attrs.frozen(kw_only=True)
class Run:
    """A run as `resume_exact` sees it.

    Attributes:
        start: makes the first state.
        batch: what the next step is given: a function of the state's cursor and key alone.
        step: `(state, batch) -> (state, metrics)`; it also moves the cursor. It may reuse the memory of the state.
        steps: how many there are.
        roles: who owns which parameters; None where that need not be saved.
        like: makes a state with the structure that a state has after so many steps; None where all have that of
            the first.
    """

    start: Callable[[], TrainState]
    batch: Callable[[TrainState], Any]
    step: Callable[[TrainState, Any], tuple[TrainState, Mapping[str, Any]]]
    steps: int
    roles: RoleLayout | None = None
    like: Callable[[int], TrainState] | None = None


def resume_exact(run: Run, cuts: Sequence[int] | None = None) -> TrainState:
    """A run that is saved, loaded into a fresh tree and continued equals the uninterrupted one bit for bit.

    Every step after a cut is compared, metrics included. Then a run that is cut after every step is compared too,
    and one that is saved on the way without being stopped.

    Args:
        run: what to run.
        cuts: after how many steps to stop; every number from 0 to `run.steps` when it is not given.

    Returns:
        The last state.

    Raises:
        AssertionError: names the cut, the step, and the first path that differs.
        CheckpointError: the state cannot be stored.
        ValueError: the run has no step, or a cut is not within it.
    """
    require_some(run.steps, f"a run of {run.steps} steps never goes on", "give resume_exact a run of 1 at least")
    chosen = range(run.steps + 1) if cuts is None else cuts
    for cut in chosen:
        if not 0 <= cut <= run.steps:
            raise ValueError(f"a run of {run.steps} steps cannot be cut after step {cut}")
    whole = list(_continued(run, run.start(), 0))
    with tempfile.TemporaryDirectory() as folder:
        _saving(run, whole, folder, chosen)
        for cut in chosen:
            state = _loaded(run, folder, cut)
            _require_equal(whole[cut][0], state, f"what was saved and loaded after step {cut}")
            for number, moment in enumerate(_continued(run, state, cut)[1:], cut + 1):
                _require_same(whole[number], moment, number, f"stopped after step {cut} and continued")
    with tempfile.TemporaryDirectory() as folder:
        _stopping(run, whole, folder)
    return whole[-1][0]


Moment = tuple[TrainState, Mapping[str, Any]]
"""A state and the metrics of the step that led to it."""


def _continued(run: Run, state: TrainState, done: int) -> Sequence[Moment]:
    """Copies of every state from this one on: a step may write over the one it was given."""
    found: list[Moment] = [(_copied(state), {})]
    for _ in range(done, run.steps):
        state, metrics = run.step(state, run.batch(state))
        found.append((_copied(state), dict(metrics)))
    return found


def _saving(run: Run, whole: Sequence[Moment], folder: str, cuts: Sequence[int]) -> None:
    """The run once more, saved at every cut."""
    state = run.start()
    for number in range(run.steps + 1):
        if number in cuts:
            save_state(folder, number, state, _IDENTITY, keep=run.steps + 1, roles=run.roles)
        if number < run.steps:
            state, metrics = run.step(state, run.batch(state))
            _require_same(whole[number + 1], (state, metrics), number + 1, "saved on the way")


def _stopping(run: Run, whole: Sequence[Moment], folder: str) -> None:
    """The run once more, saved and loaded after every step."""
    state = run.start()
    for number in range(1, run.steps + 1):
        save_state(folder, number - 1, state, _IDENTITY, keep=1, roles=run.roles)
        state = _loaded(run, folder, number - 1)
        state, metrics = run.step(state, run.batch(state))
        _require_same(whole[number], (state, metrics), number, "stopped after every step and continued")


def _loaded(run: Run, folder: str, step: int) -> TrainState:
    like = run.start() if run.like is None else run.like(step)
    # nothing but shapes, dtypes and places may come from it
    blank = tree.map(lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, like)
    return load_state(f"{folder}/step-{step:08d}", blank, _IDENTITY, roles=run.roles)


def _require_same(expected: Moment, received: Moment, number: int, what: str) -> None:
    _require_equal(dict(expected[1]), dict(received[1]), f"{what}, the metrics of step {number}")
    _require_equal(expected[0], received[0], f"{what}, the state after step {number}")


def _require_equal(expected: Any, received: Any, what: str) -> None:
    difference = tree.first_difference(expected, received)
    if difference is not None:
        raise AssertionError(
            f"{what}: unlike the uninterrupted run at {difference}; everything that a step reads must be in the state"
        )


def _copied(state: TrainState) -> TrainState:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
