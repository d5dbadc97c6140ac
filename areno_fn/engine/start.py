"""The first state of a run, and the shape of the states it saves."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.ckpt import hf
from areno_fn.ckpt.resume import load_state, read_manifest
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.engine.plan import Plan
from areno_fn.steps.recipes import ACTOR


def initial_state(plan: Plan, progress: hf.Progress | None = None) -> TrainState:
    """Loads or draws the parameters; every clock at zero.

    Args:
        progress: told of every loaded tensor, up to all that the layout claims.
    """
    key = Key.of(plan.spec.seed)
    params = {ACTOR: plan.model.load(key.fold("init"), plan.device, progress)}
    plan.roles.check(params)
    return _blank(params, key)


def resumed_state(plan: Plan, checkpoint: str) -> TrainState:
    """Reads a checkpoint of this run, bit for bit.

    Raises:
        CheckpointError: it is damaged, or belongs to another run.
    """
    manifest = read_manifest(checkpoint)
    plan.identity.require(manifest.identity, checkpoint)
    at = _cursor(manifest.values.scalars, checkpoint)
    return load_state(checkpoint, _like(plan, at), plan.identity, plan.device)


def _cursor(saved: Mapping[str, object], checkpoint: str) -> Cursor:
    place: dict[str, int] = {}
    for name in ("phase", "step", "epoch", "batch"):
        value = saved.get(f"cursor.{name}")
        if not isinstance(value, int):
            raise CheckpointError(
                f"{checkpoint} does not say where the run stood: cursor.{name} is {value!r}, but must be an integer"
            )
        place[name] = value
    return Cursor(**place)


def _like(plan: Plan, at: Cursor) -> TrainState:
    """A state of meta tensors with the structure that a state saved at `at` has.

    Between two phases the optimizer state and the snapshots are still those of the phase before.
    """
    blank = _blank({ACTOR: plan.model.shapes()}, Key.of(0))
    phase = at.phase if at.step else at.phase - 1
    if phase < 0:
        return blank
    return replace(plan.phases[phase].algorithm.begin(blank), cursor=at)


def _blank(params: dict[str, object], key: Key) -> TrainState:
    return TrainState(params=params, optim={}, snapshots={}, counters=Counters(), key=key, cursor=Cursor())
