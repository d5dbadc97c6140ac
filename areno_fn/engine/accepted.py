"""What may change where a run goes on with other phases or optimizers: all of which the state keeps nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch

from areno_fn.ckpt.manifest import Manifest
from areno_fn.ckpt.trees import Values, differences
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.optim import groups_of
from areno_fn.contracts.spec import FlowTaught, OptimizerSpec, Phase, RunSpec, SGDSpec, folders_of
from areno_fn.contracts.state import Cursor
from areno_fn.engine.cast import teacher_roles
from areno_fn.engine.composition import snapshots_of
from areno_fn.engine.plan import Plan
from areno_fn.steps.recipes import CRITIC, TEACHER

T = TypeVar("T")


def begun(recorded: RunSpec, at: Cursor) -> list[Phase]:
    """The phases that are done, and the one in which the run stands."""
    return recorded.phases[: at.phase + (at.step > 0)]


def require_phases(plan: Plan, at: Cursor, recorded: RunSpec, manifest: Manifest) -> None:
    """Phases that have begun keep their names, places and roles; what one of them uses beside the actor keeps its shapes.

    Raises:
        SpecError: says which would not.
    """
    done = begun(recorded, at)
    before, now = [phase.name for phase in done], [phase.name for phase in plan.spec.phases[: len(done)]]
    if now != before:
        raise SpecError(
            f"accept: the run has begun the phases {', '.join(before)}, and they would now be {', '.join(now)}; "
            f"only phases behind them may be added, removed or renamed"
        )
    for old, new in zip(done, plan.spec.phases, strict=False):
        if old.algorithm.roles != new.algorithm.roles:
            raise SpecError(
                f"accept: the phase {old.name} has begun to train {_listed(old.algorithm.roles)}, and would now train "
                f"{_listed(new.algorithm.roles)}; add a phase of the other algorithm behind it"
            )
    for role in sorted(used_roles(recorded, at) - {own.name for own in plan.finetune.roles.roles}):
        _require_kept_role(plan, manifest, role)


def require_kept(now: Phase, before: Phase) -> None:
    """The phase whose state is saved keeps the snapshots that were taken when it began.

    Raises:
        SpecError: says which they are.
    """
    old, new = snapshots_of(before), snapshots_of(now)
    if old != new:
        raise SpecError(
            f"accept: the phase {now.name} has begun with {_kept(old)}, and would now keep {_kept(new)}; a snapshot is taken when "
            f"a phase begins, so whether there is an `ema`, and a reference (by kl_coef or the algorithm), stays as it was"
        )


def require_memory(now: Phase, before: Phase) -> None:
    """What an optimizer has gathered goes on in one of its kind alone, with the same groups.

    Raises:
        SpecError: names the optimizer.
    """
    earlier = {optimizer.role: optimizer for optimizer in before.optimizers}
    for optimizer in now.optimizers:
        if optimizer.role in earlier and _memory(optimizer) != _memory(earlier[optimizer.role]):
            raise SpecError(
                f"accept: phases.{now.name}.optimizers.{optimizer.role} keeps something else of past gradients than the one "
                f"before; with --accept optimizers its kind, its groups and their paths, and whether it has momentum stay as "
                f"they were"
            )


def used_roles(recorded: RunSpec, at: Cursor) -> frozenset[str]:
    """The roles that phases which have begun train, and the teachers from whose folders they learn."""
    phases = begun(recorded, at)
    roles = {path: role for path, (role, _) in teacher_roles(recorded).items()}
    taught = [phase.algorithm for phase in phases if isinstance(phase.algorithm, FlowTaught)]
    trained = {role for phase in phases for role in phase.algorithm.roles}
    return frozenset(trained | {roles[path] for algorithm in taught for path in folders_of(algorithm)})


def saved_roles(manifest: Manifest, names: Collection[str]) -> dict[str, Any]:
    """What a state holds of some roles: by path, tensors as meta tensors; nothing of a role that it does not have."""
    found = {}
    for name in names:
        tensors = {
            path: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            for path, spec in _bare(manifest.specs, name).items()
        }
        found[name] = tensors | _bare(manifest.values.scalars, name)
    return {name: own for name, own in found.items() if own}


def _require_kept_role(plan: Plan, manifest: Manifest, role: str) -> None:
    shapes = plan.shapes()
    if role not in shapes:  # a phase that has begun uses it, and keeps its roles; a teacher's folder may be gone
        raise SpecError(f"accept: a phase that has begun uses the {role}, and there would be none; leave it as it was")
    tensors, scalars = _bare(manifest.specs, role), _bare(manifest.values.scalars, role)
    found = differences(tensors, Values(scalars=scalars), shapes[role])
    if found:
        taught = role.startswith(TEACHER)
        path = "critic.path" if role == CRITIC else "its folder" if taught else "finetune"
        raise SpecError(
            f"accept: the {role} has been {'used' if taught else 'trained'}, and now its parameters would be others "
            f"({found[0]}); leave {path} and the dtype of the model as they were"
        )


def _bare(leaves: Mapping[str, T], role: str) -> dict[str, T]:
    """Those of a role, by their paths in it."""
    start = f"params.{role}."
    return {path.removeprefix(start): leaf for path, leaf in leaves.items() if path.startswith(start)}


def _memory(spec: OptimizerSpec) -> tuple[object, ...]:
    """What decides the structure of an optimizer's state."""
    kept = not isinstance(spec, SGDSpec) or spec.momentum > 0
    return type(spec), kept, [(group.name, group.paths) for group in groups_of(spec)]


def _listed(roles: tuple[str, ...]) -> str:
    return " and ".join(roles)


def _kept(snapshots: list[str]) -> str:
    return f"the snapshots {' and '.join(snapshots)}" if snapshots else "no snapshot"
