"""Mistakes planted in roles that are right otherwise, at places that hypothesis picks, and what a refusal must name.

    python tests/faults/role_plants.py

prints one sentence for each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import OptimizerGroup, OptimizerLayout
from areno_fn.contracts.roles import RoleLayout
from areno_fn.testing.role_strategies import RoleTrees, role_trees

Draw = Callable[..., Any]
Kind = Callable[[Draw], tuple[Callable[[], object], tuple[str, ...]]]
"""What is refused, as a call, and what the sentence must name."""

PLANTS: dict[str, Kind] = {}


def plant(kind: Kind) -> Kind:
    PLANTS[kind.__name__.replace("_", " ")] = kind
    return kind


# ------------------------------------------------------------------------------------------------ places


def of(trees: RoleTrees, *, trainable: bool) -> list[str]:
    return [role.name for role in trees.layout.roles if role.trainable == trainable]


def pick(draw: Draw, trees: RoleTrees, role: str) -> str:
    """The path of a leaf of a role that the role itself owns."""
    own = [path for path, _ in tree.leaves_with_path(trees.params[role]) if not path.startswith("trunk")]
    path: str = draw(st.sampled_from(own))
    return path


def put(params: dict[str, Any], role: str, path: str, leaf: torch.Tensor) -> dict[str, Any]:
    """The parameters with another leaf at one place; the other trees are what they were."""
    return {**params, role: tree.map_with_path(lambda at, old: leaf if at == path else old, params[role])}


def leaf_at(params: dict[str, Any], role: str, path: str) -> torch.Tensor:
    return dict(tree.leaves_with_path(params[role]))[path]


def two(draw: Draw, names: list[str]) -> tuple[str, str]:
    first, second = draw(st.permutations(names))[:2]
    return first, second


def view(draw: Draw, leaf: torch.Tensor) -> torch.Tensor:
    """A leaf through another tensor of the same storage."""
    return draw(st.sampled_from([leaf, leaf.detach(), leaf.transpose(0, -1), leaf.flatten(), leaf[:1]]))


def overlapping(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one buffer that share at least one element and are not one tensor."""
    size = draw(st.integers(4, 12))
    start = draw(st.integers(1, size - 2))
    stop = draw(st.integers(start + 1, size))
    buffer = torch.zeros(size)
    kinds = [(buffer[:stop], buffer[start:]), (buffer, buffer[start:stop]), (buffer[::2], buffer[: max(2, stop)])]
    return draw(st.sampled_from(kinds))


def plain(trees: RoleTrees) -> RoleTrees:
    """Without snapshots and moments, so that a plant is the only thing that is shared."""
    return attrs.evolve(trees, snapshots={}, optim={})


# ------------------------------------------------------------------------------------------------ storage


@plant
def two_trainable_roles_share_a_storage(draw: Draw) -> Any:
    trees = plain(draw(role_trees(trainable=2)))
    one, other = two(draw, of(trees, trainable=True))
    here, there = pick(draw, trees, one), pick(draw, trees, other)
    params = put(trees.params, other, there, view(draw, leaf_at(trees.params, one, here)))
    return attrs.evolve(trees, params=params).check, (f"{one}.{here}", f"{other}.{there}", "copy one of them")


@plant
def two_trainable_roles_have_disjoint_parts_of_one_storage(draw: Draw) -> Any:
    trees = plain(draw(role_trees(trainable=2)))
    one, other = two(draw, of(trees, trainable=True))
    here, there = pick(draw, trees, one), pick(draw, trees, other)
    buffer = torch.zeros(8)
    params = put(put(trees.params, one, here, buffer[:4]), other, there, buffer[4:])
    return attrs.evolve(trees, params=params).check, (f"{one}.{here}", f"{other}.{there}", "copy one of them")


@plant
def two_trainable_roles_overlap_through_two_storages(draw: Draw) -> Any:
    """As tensors made of one array in memory do."""
    trees = plain(draw(role_trees(trainable=2)))
    one, other = two(draw, of(trees, trainable=True))
    here, there = pick(draw, trees, one), pick(draw, trees, other)
    array = np.zeros(9, dtype=np.float32)
    params = put(trees.params, one, here, torch.from_numpy(array[:5]))
    params = put(params, other, there, torch.from_numpy(array[draw(st.integers(0, 4)) :][:5]))
    return attrs.evolve(trees, params=params).check, (f"{one}.{here}", f"{other}.{there}", "copy one of them")


def _within(draw: Draw, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[RoleTrees, tuple[str, str]]:
    trees = plain(draw(role_trees(leaves=2)))
    role = draw(st.sampled_from(of(trees, trainable=True)))
    here, there = two(draw, [path for path, _ in tree.leaves_with_path(trees.params[role])])
    params = put(put(trees.params, role, here, pair[0]), role, there, pair[1])
    return attrs.evolve(trees, params=params), (f"{role}.{here}", f"{role}.{there}")


@plant
def two_leaves_of_a_trainable_role_overlap(draw: Draw) -> Any:
    trees, paths = _within(draw, overlapping(draw))
    return trees.check, (*paths, "copy one of them")


@plant
def a_tied_parameter_is_two_leaves(draw: Draw) -> Any:
    leaf = torch.zeros(3)
    trees, paths = _within(draw, (leaf, leaf))
    return trees.check, (*paths, "keep a tied parameter as one leaf")


def _beside_trunk(draw: Draw) -> tuple[RoleTrees, str, str]:
    trees = plain(draw(role_trees(frozen=1)))
    role, trunk = draw(st.sampled_from(of(trees, trainable=True))), draw(st.sampled_from(of(trees, trainable=False)))
    others = [attrs.evolve(r, trunk=trunk if r.name == role else "") for r in trees.layout.roles]
    return attrs.evolve(trees, layout=RoleLayout(roles=tuple(others)), params=_owned(trees)), role, trunk


def _owned(trees: RoleTrees) -> dict[str, Any]:
    """The parameters without what a frozen role holds of its trunk."""
    return {name: {k: v for k, v in own.items() if k != "trunk"} for name, own in trees.params.items()}


@plant
def a_trainable_role_holds_a_leaf_of_its_trunk(draw: Draw) -> Any:
    trees, role, trunk = _beside_trunk(draw)
    here, there = pick(draw, trees, role), pick(draw, trees, trunk)
    params = put(trees.params, role, here, leaf_at(trees.params, trunk, there))
    return attrs.evolve(trees, params=params).check, (
        f"{role}.{here}",
        f"{trunk}.{there}",
        f"leave its trunk in {trunk!r}",
    )


@plant
def two_frozen_roles_share_what_is_no_trunk(draw: Draw) -> Any:
    trees = plain(draw(role_trees(frozen=2)))
    one, other = two(draw, of(trees, trainable=False))
    layout = RoleLayout(roles=tuple(attrs.evolve(role, trunk="") for role in trees.layout.roles))
    trees = attrs.evolve(trees, layout=layout, params=_owned(trees))
    here, there = pick(draw, trees, one), pick(draw, trees, other)
    params = put(trees.params, other, there, view(draw, leaf_at(trees.params, one, here)))
    return attrs.evolve(trees, params=params).check, (f"{one}.{here}", f"{other}.{there}", "as trunk")


@plant
def a_frozen_role_is_a_part_of_a_trainable_one(draw: Draw) -> Any:
    trees = plain(draw(role_trees(frozen=1)))
    one, other = draw(st.sampled_from(of(trees, trainable=True))), draw(st.sampled_from(of(trees, trainable=False)))
    here, there = pick(draw, trees, one), pick(draw, trees, other)
    first, second = overlapping(draw)
    params = put(put(trees.params, one, here, first), other, there, second)
    return attrs.evolve(trees, params=params).check, (f"{one}.{here}", f"{other}.{there}", "copy one of them")


@plant
def a_snapshot_is_a_part_of_a_trainable_role(draw: Draw) -> Any:
    trees = plain(draw(role_trees()))
    role = draw(st.sampled_from(of(trees, trainable=True)))
    here = pick(draw, trees, role)
    first, second = overlapping(draw)
    params = put(trees.params, role, here, first)
    snapshots = {"reference": put(trees.params, role, here, second)[role]}
    made = attrs.evolve(trees, params=params, snapshots=snapshots)
    return made.check, (f"{role}.{here}", f"snapshots.reference.{here}", "copy one of them")


@plant
def a_snapshot_holds_a_role_that_is_moved_in_place(draw: Draw) -> Any:
    trees = plain(draw(role_trees()))
    role = draw(st.sampled_from(of(trees, trainable=True)))
    here = pick(draw, trees, role)
    clone = tree.map(torch.clone, trees.params)
    made = attrs.evolve(trees, snapshots={"reference": put(clone, role, here, leaf_at(trees.params, role, here))[role]})
    made.check()  # the very tensors may be held while updates make new ones
    named = (f"{role}.{here}", f"snapshots.reference.{here}", f"role {role!r} is moved in place")
    return lambda: made.check(in_place=(role,)), named


@plant
def a_frozen_role_holds_a_role_that_is_moved_in_place(draw: Draw) -> Any:
    trees = plain(draw(role_trees(frozen=1)))
    layout = RoleLayout(roles=tuple(attrs.evolve(role, trunk="") for role in trees.layout.roles))
    trees = attrs.evolve(trees, layout=layout, params=_owned(trees))
    one, other = draw(st.sampled_from(of(trees, trainable=True))), draw(st.sampled_from(of(trees, trainable=False)))
    here, there = pick(draw, trees, one), pick(draw, trees, other)
    made = attrs.evolve(trees, params=put(trees.params, other, there, leaf_at(trees.params, one, here)))
    made.check()
    return lambda: made.check(in_place=(one,)), (f"{one}.{here}", f"{other}.{there}", f"role {one!r} is moved in place")


@plant
def moments_hold_a_role_that_is_moved_in_place(draw: Draw) -> Any:
    trees = plain(draw(role_trees()))
    role = draw(st.sampled_from(of(trees, trainable=True)))
    here = pick(draw, trees, role)
    made = attrs.evolve(trees, optim={role: {"slow": leaf_at(trees.params, role, here)}})
    made.check()
    return lambda: made.check(in_place=(role,)), (f"{role}.{here}", f"optim.{role}.slow")


# ------------------------------------------------------------------------------------------------ roles


@plant
def a_role_is_declared_twice(draw: Draw) -> Any:
    roles = draw(role_trees()).layout.roles
    again = draw(st.sampled_from(roles))
    place = draw(st.integers(0, len(roles)))
    made = (*roles[:place], attrs.evolve(again, trainable=draw(st.booleans())), *roles[place:])
    return lambda: RoleLayout(roles=made), (f"role {again.name!r} is declared twice",)


@plant
def parameters_of_a_role_that_is_not_declared(draw: Draw) -> Any:
    trees = draw(role_trees())
    made = attrs.evolve(trees, params={**trees.params, "stranger": {"w": torch.zeros(1)}})
    return made.check, ("'stranger'", *(repr(name) for name in trees.params))


@plant
def a_role_without_parameters(draw: Draw) -> Any:
    trees = draw(role_trees(trainable=2))
    gone = draw(st.sampled_from([role.name for role in trees.layout.roles]))
    made = attrs.evolve(trees, params={name: own for name, own in trees.params.items() if name != gone})
    return made.check, (repr(gone),)


@plant
def a_trunk_that_is_trainable(draw: Draw) -> Any:
    roles = draw(role_trees(trainable=2)).layout.roles
    one, trunk = two(draw, [role.name for role in roles if role.trainable])
    made = tuple(attrs.evolve(role, trunk=trunk) if role.name == one else role for role in roles)
    return lambda: RoleLayout(roles=made), (f"role {one!r} stands on the trunk {trunk!r}, which is trainable",)


@plant
def a_trunk_that_is_missing(draw: Draw) -> Any:
    roles = draw(role_trees()).layout.roles
    one = draw(st.sampled_from([role.name for role in roles]))
    made = tuple(attrs.evolve(role, trunk="bse" if role.name == one else "") for role in roles)
    return lambda: RoleLayout(roles=made), (f"role {one!r} stands on the trunk 'bse', which is no role",)


@plant
def a_trunk_that_stands_on_another(draw: Draw) -> Any:
    roles = draw(role_trees(frozen=2)).layout.roles
    below, trunk = two(draw, [role.name for role in roles if not role.trainable])
    top = draw(st.sampled_from([role.name for role in roles if role.trainable]))
    stands = {top: trunk, trunk: below}
    made = tuple(attrs.evolve(role, trunk=stands.get(role.name, "")) for role in roles)
    return lambda: RoleLayout(roles=made), (repr(top), repr(trunk), f"which stands on {below!r} itself")


# ------------------------------------------------------------------------------------------------ optimizers


def _regrouped(
    trees: RoleTrees, change: Callable[[OptimizerGroup], OptimizerGroup], *more: OptimizerGroup
) -> RoleTrees:
    return attrs.evolve(trees, groups=OptimizerLayout(groups=(*map(change, trees.groups.groups), *more)))


@plant
def a_leaf_in_no_group(draw: Draw) -> Any:
    trees = draw(role_trees())
    role = draw(st.sampled_from(of(trees, trainable=True)))
    gone = pick(draw, trees, role)

    def without(group: OptimizerGroup) -> OptimizerGroup:
        return attrs.evolve(group, paths=tuple(p for p in group.paths if (group.role, p) != (role, gone)))

    return _regrouped(trees, without).check, (f"{role}.{gone} is in no optimizer group",)


@plant
def a_group_names_a_leaf_that_is_not_there(draw: Draw) -> Any:
    trees = draw(role_trees())
    grown = draw(st.sampled_from(trees.groups.groups))

    def with_one_more(group: OptimizerGroup) -> OptimizerGroup:
        return attrs.evolve(group, paths=(*group.paths, "ghost")) if group is grown else group

    return _regrouped(trees, with_one_more).check, (repr(grown.name), f"{grown.role}.ghost, which is not a parameter")


@plant
def a_leaf_in_two_groups(draw: Draw) -> Any:
    trees = draw(role_trees())
    role = draw(st.sampled_from(of(trees, trainable=True)))
    path = pick(draw, trees, role)
    second = OptimizerGroup(role=role, name="second", paths=(path,))
    (first,) = [g.name for g in trees.groups.groups if g.role == role and path in g.paths]
    return _regrouped(trees, lambda g: g, second).check, (f"{role}.{path} is in", repr(first), "'second'")


@plant
def a_group_is_declared_twice(draw: Draw) -> Any:
    trees = draw(role_trees())
    again = draw(st.sampled_from(trees.groups.groups))
    second = attrs.evolve(again, paths=())
    return _regrouped(trees, lambda g: g, second).check, (repr(again.name), repr(again.role), "declared twice")


@plant
def a_frozen_leaf_in_an_optimizer(draw: Draw) -> Any:
    trees = draw(role_trees(frozen=1))
    role = draw(st.sampled_from(of(trees, trainable=False)))
    path = pick(draw, trees, role)
    group = OptimizerGroup(role=role, name="stray", paths=(path,))
    return _regrouped(trees, lambda g: g, group).check, ("'stray'", f"{role}.{path}", "is not trainable")


@plant
def a_group_of_a_role_that_does_not_exist(draw: Draw) -> Any:
    trees = draw(role_trees())
    group = OptimizerGroup(role="stranger", name="stray", paths=("w",))
    return _regrouped(trees, lambda g: g, group).check, ("'stray'", "stranger.w", "role 'stranger' is not trainable")


@plant
def moments_of_a_frozen_role(draw: Draw) -> Any:
    trees = draw(role_trees(frozen=1))
    role = draw(st.sampled_from(of(trees, trainable=False)))
    path = pick(draw, trees, role)
    moments = {"mu": put(trees.params, role, path, torch.zeros(1))[role]}
    first = tree.leaves_with_path(moments)[0][0]
    return attrs.evolve(trees, optim={**trees.optim, role: moments}).check, (
        f"optim.{role}.{first}",
        f"role {role!r} is frozen",
    )


@plant
def moments_of_a_role_that_does_not_exist(draw: Draw) -> Any:
    trees = draw(role_trees())
    made = attrs.evolve(trees, optim={**trees.optim, "stranger": {"mu": torch.zeros(1)}})
    return made.check, ("optim.stranger.mu", "role 'stranger' is not declared")


def table() -> dict[str, str]:
    """One sentence for each kind of mistake, as the library says it."""
    said: dict[str, str] = {}

    @settings(max_examples=1, derandomize=True, database=None)
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        for name, kind in PLANTS.items():
            call, _ = kind(data.draw)
            try:
                call()
            except RecordError as error:
                said[name] = str(error)

    ask()
    return said


if __name__ == "__main__":
    for name, sentence in table().items():
        print(f"{name:58} {sentence}")
