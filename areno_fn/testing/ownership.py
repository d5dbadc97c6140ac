"""Laws of roles: every leaf has one owner, and what one role trains cannot show in another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import OptimizerLayout
from areno_fn.contracts.roles import RoleLayout
from areno_fn.contracts.state import TrainState


def roles_disjoint_exhaustive(
    roles: RoleLayout, params: Mapping[str, Any], groups: OptimizerLayout, optim: Mapping[str, Any] | None = None
) -> None:
    """The roles of the parameters are the declared ones, and the groups of optimizers divide what is trained.

    Every leaf of every trainable role is in exactly one group, no group names anything else, and no frozen role has
    a group or moments.

        roles = RoleLayout(roles=(Role(name="actor"), Role(name="reward", trainable=False)))
        laws.roles_disjoint_exhaustive(roles, params, optimizers.layout(specs, {"actor": params["actor"]}))

    Args:
        roles: the roles.
        params: `TrainState.params`; meta tensors do.
        groups: who moves what, as `areno_fn.steps.optimizers.layout` makes it of specifications.
        optim: `TrainState.optim`, where it is there already.

    Raises:
        AssertionError: names the leaf, the group or the role.
    """
    try:
        roles.check_groups(groups, params)
        roles.check(params, optim=optim)
    except RecordError as error:
        raise AssertionError(str(error)) from error


def no_alias(roles: RoleLayout, state: TrainState, *, in_place: Collection[str] = ()) -> None:
    """No update of a role can show in another, in a snapshot, or in a second leaf of its own.

    The memory of the tensors is compared, views and storages that are several objects over one memory included.

        laws.no_alias(roles, state)                          # before and after a step of your own
        laws.no_alias(roles, state, in_place=("actor",))     # if that step writes to what it was given

    Args:
        roles: the roles.
        state: a state of them.
        in_place: the roles that a step writes to instead of making new tensors; nothing may share with them, where
            otherwise a snapshot may hold the very tensors of a role.

    Raises:
        AssertionError: names both paths.
    """
    try:
        roles.check(state.params, optim=state.optim, snapshots=state.snapshots, in_place=in_place)
    except RecordError as error:
        raise AssertionError(str(error)) from error
