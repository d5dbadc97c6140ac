"""`RoleLayout`: who owns which parameters, what they stand on, and that nobody's update can show in another's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.memory import Place, one_place_each, overlaps, place
from areno_fn.contracts.optim import OptimizerLayout
from areno_fn.contracts.record import shown
from areno_fn.contracts.treepath import named_leaves


@attrs.frozen(kw_only=True)
class Role:
    """A named parameter tree of the state.

    Attributes:
        name: its key in `TrainState.params`.
        trainable: an optimizer moves it.
        exported: it goes into the trained checkpoint; training-only roles stay in resumable state alone.
        trunk: the frozen role that it stands on, empty for none. Several roles may stand on one trunk. A trainable
            role holds only its own leaves beside it, as adapters beside a base do; a frozen one may hold the trunk's.
    """

    name: str
    trainable: bool = True
    exported: bool = True
    trunk: str = ""


@attrs.frozen(kw_only=True)
class RoleLayout:
    """The roles of a run, in order; names are unique, at least one is trainable, and trunks are frozen.

    RoleLayout(roles=(
        Role(name="actor", trunk="base"),
        Role(name="critic", trunk="base", exported=False),
        Role(name="base", trainable=False),
    ))
    """

    roles: tuple[Role, ...]

    def __attrs_post_init__(self) -> None:
        names = [role.name for role in self.roles]
        for name in names:
            if names.count(name) > 1:
                raise RecordError(f"role {name!r} is declared twice")
        if not self.trainable:
            raise RecordError("a run needs at least one trainable role")
        for role in self.roles:
            self._check_trunk(role)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the roles that an optimizer moves."""
        return tuple(role.name for role in self.roles if role.trainable)

    def check(
        self,
        params: Mapping[str, Any],
        *,
        optim: Mapping[str, Any] | None = None,
        snapshots: Mapping[str, Any] | None = None,
        in_place: Collection[str] = (),
    ) -> None:
        """Refuses a state in which a leaf has no owner, or two, or in which an update of one could show in another.

        Trainable roles may not share a storage, and no two leaves of one may share a byte. A frozen role or a snapshot
        may be the very tensors that a trainable role starts from, since an update makes new ones, but no other view of
        them; where a step moves a role in place, nothing may share a byte with it. Frozen roles share what a declared
        trunk holds, and nothing else. No two elements of what is moved are one in memory, as after `expand`. The real
        storages are compared, so every tensor has one: none is sparse or nested.

        Args:
            params: `TrainState.params`.
            optim: `TrainState.optim`.
            snapshots: `TrainState.snapshots`.
            in_place: trainable roles that a step writes to, their moments included, instead of making new tensors, as a
                donated state allows.

        Raises:
            RecordError: names the path, or both, or the role.
        """
        self._check_names(params, optim or {}, in_place)
        places = [spot for name in self._names for spot in _places("params", name, params[name])]
        for part, trees in (("snapshots", snapshots), ("optim", optim)):
            places += [spot for name, kept in (trees or {}).items() for spot in _places(part, name, kept)]
        self._check_storages(places)
        self._check_elements(places, in_place)
        for first, second in sorted(overlaps(places), key=lambda pair: (pair[0].path, pair[1].path)):
            wrong = self._wrong(first, second, in_place)
            if wrong:
                raise RecordError(f"{first.path} and {second.path} {wrong}")

    def check_groups(self, groups: OptimizerLayout, params: Mapping[str, Any]) -> None:
        """Refuses groups that are no partition of the leaves of the trainable roles.

        Args:
            groups: who moves what.
            params: `TrainState.params`; meta tensors do.

        Raises:
            RecordError: names the leaf that is in no group or in two, is not there, or belongs to a role that is not trained.
        """
        self._check_names(params, {}, ())
        groups.check({name: tuple(path for path, _ in named_leaves(params[name])) for name in self.trainable})

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles)

    def _check_trunk(self, role: Role) -> None:
        if not role.trunk:
            return
        trunk = next((other for other in self.roles if other.name == role.trunk), None)
        if trunk is None:
            raise RecordError(
                f"role {role.name!r} stands on the trunk {role.trunk!r}, which is no role; roles are {', '.join(self._names)}"
            )
        if trunk.trainable:
            raise RecordError(
                f"role {role.name!r} stands on the trunk {role.trunk!r}, which is trainable; a trunk is a frozen role"
            )
        if trunk.trunk:
            raise RecordError(
                f"role {role.name!r} stands on the trunk {role.trunk!r}, which stands on {trunk.trunk!r} itself; "
                f"a trunk stands on nothing"
            )

    def _check_names(self, params: Mapping[str, Any], optim: Mapping[str, Any], in_place: Collection[str]) -> None:
        if sorted(self._names) != sorted(params):
            raise RecordError(f"the state has roles {sorted(params)}, but the plan declares {sorted(self._names)}")
        for name in optim:
            if name not in self.trainable:
                kind = "frozen" if name in self._names else "not declared"
                path = next((path for path, _ in named_leaves(optim[name])), "")
                raise RecordError(
                    f"{_joined('optim', name, path)} belongs to an optimizer, but role {name!r} is {kind}; "
                    f"trainable roles are {', '.join(self.trainable)}"
                )
        for name in in_place:
            if name not in self.trainable:
                raise RecordError(
                    f"role {name!r} cannot be moved in place; trainable roles are {', '.join(self.trainable)}"
                )

    def _check_storages(self, places: list[Place]) -> None:
        """No two trainable roles in one storage, wherever in it they stand."""
        owner: dict[tuple[str, int], Place] = {}
        for spot in places:
            if spot.owner[0] == "params" and spot.owner[1] in self.trainable:
                first = owner.setdefault((spot.space, spot.storage), spot)
                if first.owner != spot.owner:
                    raise RecordError(f"{first.path} and {spot.path} share storage; copy one of them")

    def _check_elements(self, places: list[Place], in_place: Collection[str]) -> None:
        """No two elements of a leaf that is moved are one."""
        for spot in places:
            part, name = spot.owner
            moved = (part == "params" and name in self.trainable) or (part == "optim" and name in in_place)
            if moved and not one_place_each(spot.tensor):
                raise RecordError(
                    f"{spot.path} is {shown(spot.tensor)}, but some of its elements are one in memory, as after expand or "
                    f"as_strided, and an update would move them apart; give it a clone() of its own"
                )

    def _wrong(self, first: Place, second: Place, in_place: Collection[str]) -> str:
        """What is wrong with two leaves that share a byte, as the end of a sentence; nothing where that is right."""
        owners = (first.owner, second.owner)
        trained = [name for part, name in owners if part == "params" and name in self.trainable]
        moved = [name for part, name in owners if part in ("params", "optim") and name in in_place]
        if first.owner == second.owner and trained:
            if first.same(second):
                return "are one tensor, which an update would move apart; keep a tied parameter as one leaf"
            return "share storage; copy one of them"
        if moved:
            return f"share storage, and role {moved[0]!r} is moved in place; copy one of them"
        if "optim" in (first.owner[0], second.owner[0]):
            return ""
        if len(trained) == 2 or (trained and not first.same(second)):
            return "share storage; copy one of them"
        if {part for part, _ in owners} == {"params"} and first.owner != second.owner:
            return self._wrong_beside_trunk(owners[0][1], owners[1][1])
        return ""

    def _wrong_beside_trunk(self, first: str, second: str) -> str:
        """What is wrong with a leaf that two roles hold, of which one at most is trainable."""
        one, other = (next(role for role in self.roles if role.name == name) for name in (first, second))
        standing = next((role for role in (one, other) if role.trunk in (first, second)), None)
        if standing is not None:
            if not standing.trainable:
                return ""
            return (
                f"share storage, but role {standing.name!r} trains what it holds; leave its trunk in {standing.trunk!r}"
            )
        if one.trainable or other.trainable or (one.trunk and one.trunk == other.trunk):
            return ""
        return f"share storage, and neither role is declared as the trunk of the other; copy one, or declare {first!r} as trunk"


def _places(part: str, name: str, tree: Any) -> list[Place]:
    lead = (name,) if part == "params" else (part, name)
    found = []
    for path, leaf in named_leaves(tree):
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise RecordError(
                f"{_joined(*lead, path)} is a tensor of layout {kind}, which has no storage of its own; keep it as a "
                f"dense tensor, as to_dense() makes it"
            )
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            found.append(place(_joined(*lead, path), (part, name), leaf))
    return found


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
