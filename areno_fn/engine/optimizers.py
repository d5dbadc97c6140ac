"""What moves the parameters of a phase: the optimizers of its specification, or a pair of functions of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.spec import PPO, AdamWSpec, FlowMatched, OptimizerSpec, Phase, Repeated
from areno_fn.engine.cast import Cast
from areno_fn.engine.critic import CriticPlan
from areno_fn.engine.finetune import FinetunePlan
from areno_fn.steps.optimizers import layout, optimizer, optimizer_from
from areno_fn.steps.optimizers.build import Pair
from areno_fn.steps.recipes import ACTOR, CRITIC, FAKE

Mover = Transform | Pair
"""What a user may give in the place of a specified optimizer."""


@attrs.frozen(kw_only=True)
class Trained:
    """What optimizers are given.

    Attributes:
        params: by trained role, its parameters as meta tensors.
        placements: by trained role and path, how ranks share a leaf: what is fused, what is an embedding or a head.
    """

    params: Mapping[str, Any]
    placements: Mapping[str, Mapping[str, Placement]]

    def of(self, phase: Phase) -> Trained:
        """What the algorithm of a phase trains."""
        roles = phase.algorithm.roles
        return Trained(
            params={role: self.params[role] for role in roles},
            placements={role: self.placements[role] for role in roles},
        )


def trained(finetune: FinetunePlan, critic: CriticPlan | None = None, cast: Cast | None = None) -> Trained:
    """The trained parameters of a run."""
    params = {ACTOR: finetune.shapes()[ACTOR]}
    placements: dict[str, Mapping[str, Placement]] = {ACTOR: finetune.placements}
    if critic is not None:
        params[CRITIC], placements[CRITIC] = critic.shapes(), critic.placements
    if cast is not None:
        params |= {role: own for role, own in cast.shapes().items() if role in cast.copies}
        placements |= cast.placements
    return Trained(params=params, placements=placements)


def described(phase: Phase, moved: Trained) -> list[str]:
    """How many parameters each group of a phase's optimizers has, in words, by role."""
    moved = moved.of(phase)
    groups = layout(phase.optimizers, moved.params, moved.placements).groups
    told = []
    for role, own in moved.params.items():
        sizes = {path: leaf.numel() for path, leaf in tree.leaves_with_path(own)}
        shares = [
            f"{group.name} ({sum(sizes[path] for path in group.paths):,} parameters)"
            for group in groups
            if group.role == role
        ]
        told.append(f"{role} is moved by {' and '.join(shares)}")
    return told


def long_warmups(phase: Phase, steps: int) -> list[str]:
    """The warm-ups that take all the optimizer steps of a phase, in words: a short trial of a long run has them.

    Args:
        steps: of the phase.
    """
    told = []
    for spec in phase.optimizers:
        warmup, made = spec.schedule.warmup_steps, steps_of(phase, spec.role, steps)
        if warmup >= made:
            told.append(
                f"the learning rate of {spec.role} rises for {warmup} optimizer steps, but it makes {made}: it is "
                f"{spec.lr * made / warmup:g} at the end, and lr is {spec.lr:g}"
            )
    return told


def plan_optimizers(
    phase: Phase, moved: Trained, steps: int, given: Mover | Mapping[str, Mover] | None = None
) -> dict[str, Optimizer]:
    """What moves each trained role in a phase.

    Args:
        phase: whose `optimizers` are used.
        moved: the parameters; every one must be in exactly one group.
        steps: of the phase.
        given: stands in the place of all that `optimizers` says; or, by role, of what it says of that role.

    Raises:
        SpecError: a group names no parameter, or one that it cannot have; states are to be stored in the dtype of parameters
            that are in float32; `given` is no transform, or is of a role that the phase does not train.
    """
    moved = moved.of(phase)
    own = _by_role(phase, given)
    specified = {spec.role: spec for spec in phase.optimizers if spec.role not in own}
    rest = {role: moved.params[role] for role in specified}
    layout(list(specified.values()), rest, moved.placements)
    for role, spec in specified.items():
        _require_low(spec, moved.params[role])
    made = {
        role: optimizer(spec, steps_of(phase, role, steps), moved.placements[role]) for role, spec in specified.items()
    }
    made |= {role: optimizer_from(mover) for role, mover in own.items()}
    return {role: made[role] for role in moved.params}


def _require_low(spec: OptimizerSpec, params: Any) -> None:
    """Where all parameters are their own masters, their moments are in float32 whatever is said of them."""
    if not isinstance(spec, AdamWSpec) or spec.states != "stored":
        return
    dtypes = {leaf.dtype for leaf in tree.leaves(params)}
    if all(torch.promote_types(dtype, torch.float32) == dtype for dtype in dtypes):
        raise SpecError(
            f"{spec.role}.states: 'stored' keeps moments in the dtype of the parameters, and those of this role are in float32 or "
            f"wider, as moments are without it; remove this, or train parameters in bfloat16"
        )


def _by_role(phase: Phase, given: Mover | Mapping[str, Mover] | None) -> Mapping[str, Mover]:
    roles = phase.algorithm.roles
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(roles, given)
    for role in given:
        if role not in roles:
            raise SpecError(f"optimizers: the phase {phase.name} trains {', '.join(roles)}, and no {role!r}")
    return given


def steps_of(phase: Phase, role: str, steps: int) -> int:
    """Optimizer steps that a role makes in a phase of so many steps."""
    algorithm = phase.algorithm
    if isinstance(algorithm, FlowMatched) and role == FAKE:
        return steps * algorithm.fake_updates
    if not isinstance(algorithm, Repeated):
        return steps
    if isinstance(algorithm, PPO):
        steps = max(1, steps - algorithm.critic.warmup) if role == ACTOR else steps * algorithm.critic.updates
    return steps * algorithm.epochs * algorithm.minibatches
