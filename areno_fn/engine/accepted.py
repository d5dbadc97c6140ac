"""What may change where a run goes on with other phases or optimizers: all of which the state keeps nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from areno_fn.ckpt.manifest import Manifest
from areno_fn.ckpt.trees import Values, differences
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.optim import groups_of
from areno_fn.contracts.spec import OptimizerSpec, Phase, RunSpec, SGDSpec
from areno_fn.contracts.state import Cursor
from areno_fn.engine.composition import snapshots_of
from areno_fn.engine.plan import Plan
from areno_fn.steps.recipes import CRITIC

T = TypeVar("T")

_OF_CRITIC = f"params.{CRITIC}."


def begun(recorded: RunSpec, at: Cursor) -> list[Phase]:
    """The phases that are done, and the one in which the run stands."""
    return recorded.phases[: at.phase + (at.step > 0)]


def require_phases(plan: Plan, at: Cursor, recorded: RunSpec, manifest: Manifest) -> None:
    """Phases that have begun keep their names, places and roles; the critic that one of them trains keeps its shapes.

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
    if trains_critic(recorded, at):
        _require_critic(plan, manifest)


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


def trains_critic(recorded: RunSpec, at: Cursor) -> bool:
    """Whether a phase that has begun trains the critic."""
    return any(CRITIC in phase.algorithm.roles for phase in begun(recorded, at))


def saved_critic(manifest: Manifest) -> dict[str, Any]:
    """What a state holds of a critic, by path, tensors as meta tensors; nothing where it has none."""
    tensors = {
        path: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for path, spec in manifest.specs.items()
        if path.startswith(_OF_CRITIC)
    }
    return _bare(tensors) | _bare(manifest.values.scalars)


def _require_critic(plan: Plan, manifest: Manifest) -> None:
    if plan.critic is None:  # a phase that has begun trains it, and keeps its roles
        return
    tensors, scalars = _bare(manifest.specs), _bare(manifest.values.scalars)
    found = differences(tensors, Values(scalars=scalars), plan.critic.shapes())
    if found:
        raise SpecError(
            f"accept: the critic has been trained, and now its parameters would be others ({found[0]}); "
            f"leave critic.path and the dtype of the model as they were"
        )


def _bare(leaves: Mapping[str, T]) -> dict[str, T]:
    """Those of the critic, by their paths in it."""
    return {path.removeprefix(_OF_CRITIC): leaf for path, leaf in leaves.items() if path.startswith(_OF_CRITIC)}


def _memory(spec: OptimizerSpec) -> tuple[object, ...]:
    """What decides the structure of an optimizer's state."""
    kept = not isinstance(spec, SGDSpec) or spec.momentum > 0
    return type(spec), kept, [(group.name, group.paths) for group in groups_of(spec)]


def _listed(roles: tuple[str, ...]) -> str:
    return " and ".join(roles)


def _kept(snapshots: list[str]) -> str:
    return f"the snapshots {' and '.join(snapshots)}" if snapshots else "no snapshot"
