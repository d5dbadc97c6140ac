"""Which group of an optimizer a parameter belongs to: by patterns of paths, and by what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.optim import Optimizer, OptimizerGroup, OptimizerLayout, Transform, groups_of
from areno_fn.contracts.spec import (
    AdamW8bitSpec,
    AdamWSpec,
    Group,
    MuonSpec,
    OptimizerSpec,
    Remainder,
    Schedule,
    SGDSpec,
)
from areno_fn.steps.optimizers.chain import chain
from areno_fn.steps.optimizers.clip import clipping
from areno_fn.steps.optimizers.decay import Mask, add_decayed_weights, everything, hidden, rule
from areno_fn.steps.optimizers.master import with_master
from areno_fn.steps.optimizers.orthogonal import Placements
from areno_fn.steps.optimizers.partition import Label, partition
from areno_fn.steps.optimizers.rate import scale_by_learning_rate
from areno_fn.steps.schedules import learning_rate

Settings = AdamWSpec | AdamW8bitSpec | SGDSpec | MuonSpec | Remainder


def settings(
    name: str,
    spec: Settings,
    schedule: Schedule,
    total_steps: int,
    direction: Callable[[], Transform],
    placements: Placements | None = None,
    coupled: bool = False,
) -> dict[str, tuple[Transform, ...]]:
    """The parts of an optimizer and of its groups by label: direction, weight decay and learning rate.

    Args:
        name: label of the parameters that no group names.
        spec: rate, decay and groups; the matrices of Muon decay all.
        direction: makes the transform of the gradient, one for each label.
        placements: by path, how ranks share a leaf.
        coupled: the decay is added to the gradient instead of the direction.
    """
    mask = everything if isinstance(spec, MuonSpec) else rule(spec.decay, placements)

    def made(lr: float, weight_decay: float, mask: Mask) -> tuple[Transform, ...]:
        decay = add_decayed_weights(weight_decay, mask)
        moves = (decay, direction()) if coupled else (direction(), decay)
        return (*moves, scale_by_learning_rate(learning_rate(schedule, lr, total_steps)))

    transforms = {name: made(spec.lr, spec.weight_decay, mask)}
    return transforms | {group.name: made(group.lr, group.weight_decay, everything) for group in spec.groups}


def assembled(
    max_grad_norm: float, parts: Mapping[str, tuple[Transform, ...]], label: Label, *, masters: bool = True
) -> Optimizer:
    """One clip of the whole gradient, then the parts of every label for its parameters, around float32 masters.

    Args:
        max_grad_norm: 0 does not clip.
        parts: by label.
        label: of every parameter.
        masters: whether they are kept from one update to the next.
    """
    if len(parts) == 1:
        (only,) = parts.values()
        return with_master(chain(clipping(max_grad_norm), *only), kept=masters)
    transforms = {name: chain(*own) for name, own in parts.items()}
    return with_master(chain(clipping(max_grad_norm), partition(transforms, label)), kept=masters)


def labels_of(spec: OptimizerSpec, placements: Placements | None = None) -> Label:
    """The label of every parameter: the group that names it, or the optimizer itself by its kind.

    With Muon, a hidden matrix without a group is "muon" and everything else "adamw".
    """
    groups = groups_of(spec)
    is_hidden = hidden(placements)

    def label(path: str, leaf: torch.Tensor) -> str:
        named = _claims(groups, path)
        if len(named) > 1:
            raise SpecError(f"parameter {path} is in the groups {named[0]!r} and {named[1]!r}; one may own it")
        if named:
            return named[0]
        if isinstance(spec, MuonSpec):
            return "muon" if is_hidden(path, leaf) else "adamw"
        return kind_of(spec)

    return label


def layout(
    specs: Sequence[OptimizerSpec], params: Mapping[str, Any], placements: Mapping[str, Placements] | None = None
) -> OptimizerLayout:
    """Who moves what: every trained parameter in exactly one group.

    Args:
        specs: one for each trained role.
        params: by trained role, its parameters; meta tensors do.
        placements: by role and path, how ranks share a leaf.

    Raises:
        SpecError: a group names no parameter, or one that another names or that its optimizer cannot move.
        RecordError: an optimizer belongs to a role that is not trained.
    """
    groups: list[OptimizerGroup] = []
    for spec in specs:
        named, known = tree.leaves_with_path(params.get(spec.role, {})), (placements or {}).get(spec.role)
        _require_groups(spec, named, known)
        label = labels_of(spec, known)
        owned: dict[str, list[str]] = {}
        for path, leaf in named:
            owned.setdefault(label(path, leaf), []).append(path)
        groups += [OptimizerGroup(role=spec.role, name=name, paths=tuple(paths)) for name, paths in owned.items()]
    made = OptimizerLayout(groups=tuple(groups))
    made.check({role: tuple(path for path, _ in tree.leaves_with_path(own)) for role, own in params.items()})
    return made


def matches(path: str, pattern: str) -> bool:
    """Whether a path is what a pattern says, in which every `*` stands for any text, or none."""
    first, *rest = pattern.split("*")
    if not rest:
        return path == pattern
    *middle, last = rest
    at = len(first) if path.startswith(first) else -1
    for piece in middle:
        found = path.find(piece, at) if at >= 0 else -1
        at = found + len(piece) if found >= 0 else -1
    return at >= 0 and len(path) - at >= len(last) and path.endswith(last)


def kind_of(spec: OptimizerSpec) -> str:
    """What a specification file calls an optimizer."""
    return str(spec.__struct_config__.tag)


def _require_groups(spec: OptimizerSpec, named: list[tuple[str, Any]], placements: Placements | None) -> None:
    is_hidden = hidden(placements)
    for group in groups_of(spec):
        for pattern in group.paths:
            if not any(matches(path, pattern) for path, _ in named):
                raise SpecError(
                    f"{spec.role}: the group {group.name!r} asks for {pattern!r}, which names no parameter; "
                    f"they are {', '.join(path for path, _ in named[:3])} and so on"
                )
    for group in spec.groups if isinstance(spec, MuonSpec) else ():
        for path, leaf in named:
            if _claims([group], path) and not is_hidden(path, leaf):
                raise SpecError(
                    f"{spec.role}: the group {group.name!r} gives {path} to Muon, which moves hidden matrices alone; "
                    f"put the group under `adamw`"
                )


def _claims(groups: Sequence[Group], path: str) -> list[str]:
    return [g.name for g in groups if any(matches(path, pattern) for pattern in g.paths)]
