"""The first state of a run, and the shape of the states it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from areno_fn.ckpt import hf
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.ckpt.resume import load_state
from areno_fn.contracts.errors import CheckpointError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import groups_of
from areno_fn.contracts.record import field_names, replace
from areno_fn.contracts.spec import OptimizerSpec, RunSpec, SGDSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.engine import identity
from areno_fn.engine.plan import Plan
from areno_fn.world.order import batches_per_epoch


def initial_state(plan: Plan, progress: hf.Progress | None = None) -> TrainState:
    """Loads or draws the parameters; every clock at zero.

    Args:
        progress: told of every loaded tensor, up to all that the layout claims.
    """
    key = Key.of(plan.spec.seed)
    params = plan.load(key, progress)
    plan.roles.check(params)
    return _blank(params, key)


def require_same_run(
    plan: Plan, checkpoint: Path, recorded: RunSpec | None, accept: Sequence[str] = ()
) -> tuple[str, ...]:
    """Refuses to continue another run, or a phase that has become shorter than what is done of it.

    Args:
        checkpoint: a folder of resumable state; only its manifest is read.
        recorded: the specification its run was started with, where that is still known.
        accept: fields of the identity that may differ.

    Returns:
        Those of them in which the runs differ.

    Raises:
        CheckpointError: it is damaged, or belongs to another run; names the fields of the specification that differ.
        SpecError: a phase has been cut too short, or a change cannot be accepted.
    """
    manifest = read_manifest(checkpoint)
    identity.require_same_run(plan.identity, plan.spec, manifest.identity, recorded, str(checkpoint), accept)
    at = _cursor(manifest.values.scalars, checkpoint)
    accepted = tuple(plan.identity.differences(manifest.identity))
    if "phases" in accepted:
        _require_phases(plan, at, recorded)
    if "optimizers" in accepted:
        _require_memory(plan, at, recorded)
    _require_length(plan, _placed(plan, at, recorded, accepted))
    return accepted


def resumed_state(
    plan: Plan, checkpoint: Path, recorded: RunSpec | None = None, accepted: Sequence[str] = ()
) -> TrainState:
    """Reads a checkpoint of this run, bit for bit.

    A complete run whose last phase has become longer goes on in it.

    Args:
        recorded: the specification its run was started with, where that is still known.
        accepted: what `require_same_run` returned; see `areno_fn.contracts.identity.ACCEPTABLE` for what follows.

    Raises:
        CheckpointError: it is damaged, or belongs to another run.
    """
    at = _placed(plan, _cursor(read_manifest(checkpoint).values.scalars, checkpoint), recorded, accepted)
    state = load_state(
        checkpoint, _like(plan, at), plan.identity, plan.device, roles=plan.roles, accept=tuple(accepted)
    )
    place, key = _phase_of(plan, at), Key.of(plan.spec.seed) if "seed" in accepted else state.key
    state = state if place < 0 else plan.phases[place].residency.settled(state)
    return replace(state, key=key, cursor=_within(plan, _reopened(plan, at), accepted))


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


def _require_phases(plan: Plan, at: Cursor, recorded: RunSpec | None) -> None:
    """Phases that are done, or in which the run stands, keep their names and places; others may come and go."""
    if recorded is None:
        raise SpecError(
            "accept: 'phases' cannot be accepted without the spec.yaml of the run, which says in which phase it stands"
        )
    before = [phase.name for phase in recorded.phases[: at.phase + (at.step > 0)]]
    now = [phase.name for phase in plan.spec.phases[: len(before)]]
    if now != before:
        raise SpecError(
            f"accept: the run has begun the phases {', '.join(before)}, and they would now be {', '.join(now)}; "
            f"only phases behind them may be added, removed or renamed"
        )


def _require_memory(plan: Plan, at: Cursor, recorded: RunSpec | None) -> None:
    """What an optimizer has gathered goes on in one of its kind alone, with the same groups."""
    place = _phase_of(plan, at)
    if recorded is None or not 0 <= place < len(recorded.phases):
        return
    phase = plan.phases[place].spec
    for now, before in zip(phase.optimizers, recorded.phases[place].optimizers, strict=False):
        if _memory(now) != _memory(before):
            raise SpecError(
                f"accept: phases.{phase.name}.optimizers.{now.role} keeps something else of past gradients than the one before; "
                f"with --accept optimizers its kind, its groups and their paths, and whether it has momentum stay as they were"
            )


def _memory(spec: OptimizerSpec) -> tuple[object, ...]:
    """What decides the structure of an optimizer's state."""
    kept = not isinstance(spec, SGDSpec) or spec.momentum > 0
    return type(spec), kept, [(group.name, group.paths) for group in groups_of(spec)]


def _placed(plan: Plan, at: Cursor, recorded: RunSpec | None, accepted: Sequence[str]) -> Cursor:
    """Where a state saved at `at` stands: at the beginning of a phase that a complete run has got, or where it stood."""
    if "phases" in accepted and recorded is not None and len(recorded.phases) <= at.phase < len(plan.phases):
        return Cursor(phase=at.phase, total=at.total)
    return at


def _within(plan: Plan, at: Cursor, accepted: Sequence[str]) -> Cursor:
    """The same place, or the next epoch where the data have become less and there is no such batch."""
    if at.phase >= len(plan.phases) or not {"data", "phases"} & set(accepted):
        return at
    phase = plan.phases[at.phase]
    there = at.batch < batches_per_epoch(phase.size, phase.spec.batch.rows)
    return at if there else replace(at, epoch=at.epoch + 1, batch=0)


def _require_length(plan: Plan, at: Cursor) -> None:
    """A phase may become shorter, but not than what is done of it."""
    phase = plan.phases[min(at.phase, len(plan.phases) - 1)]
    if at.step > phase.steps:
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
    blank = _blank(plan.shapes(), Key.of(0))
    phase = _phase_of(plan, at)
    if phase < 0:
        return blank
    begun = plan.phases[phase].algorithm.begin(blank)
    return replace(plan.phases[phase].residency.expected(begun), cursor=at)


def _blank(params: dict[str, object], key: Key) -> TrainState:
    return TrainState(params=params, optim={}, snapshots={}, counters=Counters(), key=key, cursor=Cursor())
