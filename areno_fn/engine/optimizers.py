"""What moves the parameters of a phase: the optimizers of its specification, or a pair of functions of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.spec import Phase
from areno_fn.engine.finetune import FinetunePlan
from areno_fn.steps.optimizers import layout, optimizer, optimizer_from
from areno_fn.steps.optimizers.build import Pair


@attrs.frozen(kw_only=True)
class Trained:
    """What optimizers are given.

    Attributes:
        params: by trained role, its parameters as meta tensors.
        placements: by path, how ranks share a leaf of the actor: what is fused, and what is an embedding or a head.
    """

    params: Mapping[str, Any]
    placements: Mapping[str, Placement]


def trained(finetune: FinetunePlan) -> Trained:
    """The trained parameters of a run."""
    shapes = finetune.shapes()
    return Trained(params={role: shapes[role] for role in finetune.roles.trainable}, placements=finetune.placements)


def described(phase: Phase, moved: Trained) -> str:
    """How many parameters each group of a phase's optimizers has, in words."""
    groups = layout(phase.optimizers, dict(moved.params), moved.placements).groups
    sizes = {path: leaf.numel() for own in moved.params.values() for path, leaf in tree.leaves_with_path(own)}
    shares = [f"{group.name} ({sum(sizes[path] for path in group.paths):,} parameters)" for group in groups]
    return " and ".join(shares)


def plan_optimizer(phase: Phase, moved: Trained, total_steps: int, given: Transform | Pair | None = None) -> Optimizer:
    """What moves the actor in a phase.

    Args:
        phase: whose `optimizers` are used.
        moved: the parameters; every one must be in exactly one group.
        total_steps: optimizer steps of the phase.
        given: stands in the place of all that `optimizers` says.

    Raises:
        SpecError: a group names no parameter, or one that it cannot have; or `given` is no transform.
    """
    if given is not None:
        return optimizer_from(given)
    layout(phase.optimizers, dict(moved.params), moved.placements)
    (spec,) = phase.optimizers
    return optimizer(spec, total_steps, moved.placements)
