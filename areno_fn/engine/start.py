"""The first state of a run, and the shape of the states it saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areno_fn.ckpt import hf
from areno_fn.ckpt.resume import load_state, read_manifest
from areno_fn.contracts.errors import CheckpointError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import field_names, replace
from areno_fn.contracts.spec import RunSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.engine import identity
from areno_fn.engine.plan import Plan


def initial_state(plan: Plan, progress: hf.Progress | None = None) -> TrainState:
    """Loads or draws the parameters; every clock at zero.

    Args:
        progress: told of every loaded tensor, up to all that the layout claims.
    """
    key = Key.of(plan.spec.seed)
    params = plan.finetune.load(key, plan.device, progress)
    plan.roles.check(params)
    return _blank(params, key)


def require_same_run(plan: Plan, checkpoint: Path, recorded: RunSpec | None) -> None:
    """Refuses to continue another run, or a phase that has become shorter than what is done of it.

    Args:
        checkpoint: a folder of resumable state; only its manifest is read.
        recorded: the specification its run was started with, where that is still known.

    Raises:
        CheckpointError: it is damaged, or belongs to another run; names the fields of the specification that differ.
        SpecError: the last phase has been cut too short.
    """
    manifest = read_manifest(checkpoint)
    identity.require_same_run(plan.identity, plan.spec, manifest.identity, recorded, str(checkpoint))
    _require_length(plan, _cursor(manifest.values.scalars, checkpoint))


def resumed_state(plan: Plan, checkpoint: Path) -> TrainState:
    """Reads a checkpoint of this run, bit for bit.

    A complete run whose last phase has become longer goes on in it.

    Raises:
        CheckpointError: it is damaged, or belongs to another run.
    """
    at = _cursor(read_manifest(checkpoint).values.scalars, checkpoint)
    state = load_state(checkpoint, _like(plan, at), plan.identity, plan.device)
    return replace(state, cursor=_reopened(plan, at))


def _cursor(saved: Mapping[str, object], checkpoint: Path) -> Cursor:
    place: dict[str, int] = {}
    for name in field_names(Cursor()):
        value = saved.get(f"cursor.{name}")
        if not isinstance(value, int):
            raise CheckpointError(
                f"{checkpoint} does not say where the run stood: cursor.{name} is {value!r}, but must be an integer"
            )
        place[name] = value
    return Cursor(**place)


def _require_length(plan: Plan, at: Cursor) -> None:
    """Only the last phase may change its length; the length of the others is part of the identity."""
    phase = plan.phases[-1]
    if at.phase >= len(plan.phases) - 1 and at.step > phase.steps:
        raise SpecError(
            f"phases.{phase.spec.name}: {at.step} of its steps are done, so it cannot be cut to {phase.steps}; "
            f"ask for at least {at.step}"
        )


def _reopened(plan: Plan, at: Cursor) -> Cursor:
    """Behind the last phase, back into it where there are steps left to do; a phase that stops at a score has none."""
    last = len(plan.phases) - 1
    phase = plan.phases[last]
    longer = at.phase > last and at.step < phase.steps and not phase.spec.stop_at
    return replace(at, phase=last) if longer else at


def _phase_of(plan: Plan, at: Cursor) -> int:
    """The phase whose optimizer state a state saved at `at` holds; -1 before the first."""
    return min(at.phase, len(plan.phases) - 1) if at.step else at.phase - 1


def _like(plan: Plan, at: Cursor) -> TrainState:
    """A state of meta tensors with the structure that a state saved at `at` has.

    Between two phases the optimizer state and the snapshots are still those of the phase before.
    """
    blank = _blank(plan.finetune.shapes(), Key.of(0))
    phase = _phase_of(plan, at)
    return blank if phase < 0 else replace(plan.phases[phase].algorithm.begin(blank), cursor=at)


def _blank(params: dict[str, object], key: Key) -> TrainState:
    return TrainState(params=params, optim={}, snapshots={}, counters=Counters(), key=key, cursor=Cursor())
