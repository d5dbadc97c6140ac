"""The first state of a run, and the shape of the states it saves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from areno_fn.ckpt import hf
from areno_fn.ckpt.manifest import Manifest, read_manifest
from areno_fn.ckpt.resume import load_state
from areno_fn.contracts.errors import CheckpointError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import field_names, replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import Phase, RunSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.engine import identity
from areno_fn.engine.accepted import (
    require_kept,
    require_memory,
    require_phases,
    saved_roles,
    used_roles,
)
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
    _require_acceptable(plan, at, recorded, accepted, manifest)
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
    manifest = read_manifest(checkpoint)
    saved_at = _cursor(manifest.values.scalars, checkpoint)
    at = _placed(plan, saved_at, recorded, accepted)
    like, roles, anew = _like(plan, at), plan.roles, _anew(plan, manifest, saved_at, recorded, accepted)
    if anew:
        like, roles = _with(like, anew, saved_roles(manifest, anew)), _with_saved(roles, anew, manifest.roles)
    state = load_state(checkpoint, like, plan.identity, plan.device, roles=roles, accept=tuple(accepted))
    place, key = _phase_of(plan, at), Key.of(plan.spec.seed) if "seed" in accepted else state.key
    state = state if place < 0 else plan.phases[place].residency.settled(state)
    if anew:
        state = _with(state, anew, plan.beside(state.params))
    return replace(state, key=key, cursor=_within(plan, _reopened(plan, at), accepted))


def _anew(
    plan: Plan, manifest: Manifest, at: Cursor, recorded: RunSpec | None, accepted: Sequence[str]
) -> frozenset[str]:
    """The roles beside the actor that begin here, or end: the phases are others, and none that has begun has used them."""
    if "phases" not in accepted or recorded is None:
        return frozenset()
    found = {role.name for role in (*plan.roles.roles, *(manifest.roles or ()))}
    return frozenset(found - {role.name for role in plan.finetune.roles.roles} - used_roles(recorded, at))


def _with(state: TrainState, names: Collection[str], found: Mapping[str, Any]) -> TrainState:
    """The state with these roles in the place of its own of those names, or without them."""
    others = {role: own for role, own in state.params.items() if role not in names}
    return replace(state, params=others | {role: own for role, own in found.items() if role in names})


def _with_saved(roles: RoleLayout, names: Collection[str], saved: Sequence[Role] | None) -> RoleLayout:
    """The roles with the saved ones of those names in the place of their own."""
    others = tuple(role for role in roles.roles if role.name not in names)
    return RoleLayout(roles=others + tuple(role for role in saved or () if role.name in names))


def _require_acceptable(
    plan: Plan, at: Cursor, recorded: RunSpec | None, accepted: Sequence[str], manifest: Manifest
) -> None:
    """Refuses changes of phases and optimizers that do not go with what the state holds."""
    if recorded is None:
        if "phases" in accepted:
            raise SpecError(
                "accept: 'phases' cannot be accepted without the spec.yaml of the run, which says in which phase it stands"
            )
        return
    if "phases" in accepted:
        require_phases(plan, at, recorded, manifest)
    place = _phase_of(plan, _placed(plan, at, recorded, accepted))
    if 0 <= place < len(recorded.phases):
        now, before = plan.phases[place].spec, recorded.phases[place]
        if "phases" in accepted:
            require_kept(now, before)
        if "optimizers" in accepted:
            require_memory(now, before)


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


def _placed(plan: Plan, at: Cursor, recorded: RunSpec | None, accepted: Sequence[str]) -> Cursor:
    """Where a state saved at `at` stands: where it stood, but for two places at the end of what phases there are.

    A complete run that has got phases stands at the first of them; one that was to begin a phase that is gone is complete.
    """
    if "phases" not in accepted or recorded is None:
        return at
    if len(recorded.phases) <= at.phase < len(plan.phases):
        return Cursor(phase=at.phase, total=at.total)
    if at.phase == len(plan.phases) and not at.step:
        return _behind_last(plan, at, recorded.phases[at.phase - 1])
    return at


def _behind_last(plan: Plan, at: Cursor, before: Phase) -> Cursor:
    """Behind the last phase, at the place in its data that its steps lead to; `before` is the phase as it was done."""
    last = plan.phases[-1]
    each = batches_per_epoch(last.size, last.spec.batch.rows)
    done = last.steps if before.stop_at else before.steps or before.epochs * each
    epoch, batch = divmod(done, each)
    return Cursor(phase=at.phase, step=done, epoch=epoch, batch=batch, total=at.total)


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
