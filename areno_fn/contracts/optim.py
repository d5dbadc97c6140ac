"""What an optimizer is: two pure functions. `OptimizerLayout` says which parameters each one owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.spec import Group, MuonSpec, OptimizerSpec


@attrs.frozen(kw_only=True)
class Transform:
    """A gradient transformation in the manner of optax: it maps gradients to updates and never sees a step.

    Attributes:
        init: `params -> state`.
        update: `(updates, state, params) -> (updates, state)`; updates are *added* to parameters.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


@attrs.frozen(kw_only=True)
class Optimizer:
    """What moves the parameters of one role.

    Attributes:
        init: `params -> state`.
        apply: `(gradients, state, params) -> (params, state, stats)`; `stats` are named scalar tensors.
        apply_in_place: the same function, bit for bit, whose results take the memory of `state` and `params`, which may
            not be used any more; None where there is nothing to be saved that way.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any], tuple[Any, Any, dict[str, Any]]]
    apply_in_place: Callable[[Any, Any, Any], tuple[Any, Any, dict[str, Any]]] | None = None


@attrs.frozen(kw_only=True)
class OptimizerGroup:
    """Parameters that one optimizer moves with one setting."""

    role: str
    name: str
    paths: tuple[str, ...]


@attrs.frozen(kw_only=True)
class OptimizerLayout:
    """Every trainable parameter in exactly one group."""

    groups: tuple[OptimizerGroup, ...]

    def check(self, owned: dict[str, tuple[str, ...]]) -> None:
        """Refuses an assignment that is not a partition.

        Args:
            owned: the paths of the parameters of each trainable role.
        """
        for number, group in enumerate(self.groups):
            if group.role not in owned:
                what = f"{group.role}.{group.paths[0]}" if group.paths else "nothing"
                raise RecordError(
                    f"optimizer group {group.name!r} owns {what}, but role {group.role!r} is not trainable; "
                    f"trainable roles are {', '.join(sorted(owned)) or 'none'}"
                )
            if any((other.role, other.name) == (group.role, group.name) for other in self.groups[:number]):
                raise RecordError(f"optimizer group {group.name!r} of role {group.role!r} is declared twice")
        for role, paths in owned.items():
            _check_partition(role, paths, self._claims(role))

    def _claims(self, role: str) -> dict[str, str]:
        """The group that owns each path of a role."""
        claims: dict[str, str] = {}
        for group in self.groups:
            for path in group.paths if group.role == role else ():
                if path in claims:
                    raise RecordError(
                        f"{role}.{path} is in optimizer groups {claims[path]!r} and {group.name!r}; one may own it"
                    )
                claims[path] = group.name
        return claims


def _check_partition(role: str, paths: tuple[str, ...], claims: dict[str, str]) -> None:
    missing, extra = sorted(set(paths) - claims.keys()), sorted(claims.keys() - set(paths))
    if missing:
        raise RecordError(f"{role}.{missing[0]} is in no optimizer group ({len(missing)} such parameters)")
    if extra:
        raise RecordError(f"optimizer group {claims[extra[0]]!r} names {role}.{extra[0]}, which is not a parameter")


def groups_of(spec: OptimizerSpec) -> tuple[Group, ...]:
    """All groups that a specification of an optimizer declares, those of its remainder too."""
    return (*spec.groups, *spec.adamw.groups) if isinstance(spec, MuonSpec) else tuple(spec.groups)
