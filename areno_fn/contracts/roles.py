"""`RoleLayout`: who owns which parameters, and that no two trainable roles share storage by accident."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.errors import RecordError


@attrs.frozen(kw_only=True)
class Role:
    """A named parameter tree of the state.

    Attributes:
        name: its key in `TrainState.params`.
        trainable: an optimizer moves it.
        exported: it goes into the trained checkpoint; training-only roles stay in resumable state alone.
    """

    name: str
    trainable: bool = True
    exported: bool = True


@attrs.frozen(kw_only=True)
class RoleLayout:
    """The roles of a run, in order; names are unique and at least one is trainable."""

    roles: tuple[Role, ...]

    def __attrs_post_init__(self) -> None:
        names = [role.name for role in self.roles]
        for name in names:
            if names.count(name) > 1:
                raise RecordError(f"role {name!r} is declared twice")
        if not self.trainable:
            raise RecordError("a run needs at least one trainable role")

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the roles that an optimizer moves."""
        return tuple(role.name for role in self.roles if role.trainable)

    def check(self, params: dict[str, Any]) -> None:
        """Refuses a state whose roles are not the declared ones, or in which two roles share memory."""
        declared = [role.name for role in self.roles]
        if sorted(declared) != sorted(params):
            raise RecordError(f"the state has roles {sorted(params)}, but the plan declares {sorted(declared)}")
        owner: dict[int, str] = {}
        for name in self.trainable:
            for pointer in {
                _storage(leaf) for leaf in pytree.tree_leaves(params[name]) if isinstance(leaf, torch.Tensor)
            }:
                if owner.setdefault(pointer, name) != name:
                    raise RecordError(
                        f"trainable roles {owner[pointer]!r} and {name!r} share a tensor's storage; copy one of them"
                    )


def _storage(tensor: torch.Tensor) -> int:
    """What two tensors have in common when a write to one may show in the other; meta tensors have no address."""
    if not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata
