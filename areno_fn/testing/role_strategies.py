"""Hypothesis strategies for roles: layouts with their parameters, optimizers and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.optim import OptimizerGroup, OptimizerLayout
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.treepath import named_leaves

Draw = Callable[..., Any]
_NAMES = ("actor", "critic", "base", "reward", "teacher", "judge", "student")


@attrs.frozen(kw_only=True)
class RoleTrees:
    """Roles and all that belongs to them, as `TrainState` holds it.

    Attributes:
        layout: the roles.
        params: a tree of parameters for every role; a frozen role may hold what its trunk holds.
        optim: moments of trainable roles, not always of all.
        snapshots: of trainable roles: the very tensors, or copies.
        groups: every leaf of every trainable role in one group.
    """

    layout: RoleLayout
    params: dict[str, Any]
    optim: dict[str, Any]
    snapshots: dict[str, Any]
    groups: OptimizerLayout

    def check(self, *, in_place: tuple[str, ...] = ()) -> None:
        """All that a layout can check of these.

        Raises:
            RecordError: something is wrong with them.
        """
        self.layout.check(self.params, optim=self.optim, snapshots=self.snapshots, in_place=in_place)
        self.layout.check_groups(self.groups, self.params)


@st.composite
def role_trees(draw: Draw, *, trainable: int = 1, frozen: int = 0, leaves: int = 1, max_roles: int = 4) -> RoleTrees:
    """Roles that are as they should be.

    Args:
        trainable: fewest trainable roles.
        frozen: fewest frozen roles.
        leaves: fewest leaves of a role.
        max_roles: most roles, where those are not more.
    """
    count = draw(st.integers(trainable + frozen, max(trainable + frozen, max_roles)))
    names = draw(st.permutations(_NAMES))[:count]
    spare = draw(st.integers(trainable, count - frozen))
    moved, still = names[:spare], names[spare:]
    roles = [Role(name=name, exported=draw(st.booleans()), trunk=_trunk(draw, still)) for name in moved]
    trunks = {role.trunk for role in roles} - {""}
    for name in still:
        # a trunk stands on nothing, so only a role that is none may get one
        trunk = "" if name in trunks else draw(st.sampled_from(["", *sorted(trunks)]))
        roles.append(Role(name=name, trainable=False, exported=draw(st.booleans()), trunk=trunk))
    params = {role.name: draw(_parameters(leaves)) for role in roles}
    for role in roles:
        if role.trunk and not role.trainable and draw(st.booleans()):
            params[role.name] = {**params[role.name], "trunk": params[role.trunk]}
    chosen = [name for name in moved if draw(st.booleans())]
    return RoleTrees(
        layout=RoleLayout(roles=tuple(draw(st.permutations(roles)))),
        params=params,
        optim={name: {"mu": tree.map(torch.zeros_like, params[name])} for name in chosen},
        snapshots={f"of {name}": draw(_snapshot(params[name])) for name in moved if draw(st.booleans())},
        groups=OptimizerLayout(groups=tuple(group for name in moved for group in draw(_groups(name, params[name])))),
    )


def _trunk(draw: Draw, still: list[str]) -> str:
    name: str = draw(st.sampled_from(["", *still]))
    return name


def _tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
    dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float64))
    return st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)


def _parameters(leaves: int) -> st.SearchStrategy[dict[str, Any]]:
    layer = st.dictionaries(st.sampled_from(("qkv", "gate_up", "norm")), _tensors(), min_size=1, max_size=3)
    block = st.lists(layer, min_size=1, max_size=2) | _tensors()
    return st.dictionaries(
        st.sampled_from(("embed", "layers", "head", "scale")), block, min_size=leaves, max_size=max(leaves, 3)
    )


def _snapshot(params: Any) -> st.SearchStrategy[Any]:
    return st.booleans().map(lambda copied: tree.map(torch.clone, params) if copied else params)


def _groups(role: str, params: Any) -> st.SearchStrategy[tuple[OptimizerGroup, ...]]:
    paths = [path for path, _ in named_leaves(params)]
    labels = st.lists(st.sampled_from(("matrix", "rest")), min_size=len(paths), max_size=len(paths))

    def made(labels: list[str]) -> tuple[OptimizerGroup, ...]:
        owned = {
            name: tuple(path for path, label in zip(paths, labels, strict=True) if label == name)
            for name in sorted(set(labels))
        }
        return tuple(OptimizerGroup(role=role, name=name, paths=own) for name, own in owned.items())

    return labels.map(made)
