"""What must hold of a state whose memory a step may write to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.memory import one_place_each, overlaps, place
from areno_fn.contracts.state import TrainState


class Alone:
    """`require_alone`, which does not look again at the tensors that it let pass last.

    It does not keep them alive. The memory of a tensor is believed to stay what it was.
    """

    def __init__(self) -> None:
        self._passed: list[list[weakref.ref[torch.Tensor]]] = []

    def __call__(self, state: TrainState, role: str) -> None:
        """Refuses what `require_alone` refuses."""
        own = (state.params[role], state.optim[role])
        parts = [
            [node for node in tree.nodes(part) if isinstance(node, torch.Tensor)]
            for part in (own, *_others(state, role))
        ]
        if [len(part) for part in parts] != [len(part) for part in self._passed] or not all(
            known() is leaf
            for passed, part in zip(self._passed, parts, strict=True)
            for known, leaf in zip(passed, part, strict=True)
        ):
            require_alone(state, role)
            self._passed = [[weakref.ref(leaf) for leaf in part] for part in parts]


def require_alone(state: TrainState, role: str) -> None:
    """Refuses a state in which something else stands in the memory of a role's parameters or moments.

    Within the role no two leaves may share a byte, nor two elements of one leaf; other roles and snapshots may share no
    storage with it.

    Raises:
        RecordError: names both.
    """
    own = {"params": {role: state.params[role]}, "optim": {role: state.optim[role]}}
    leaves = list(_tensors(own))
    if any(leaf.requires_grad or leaf.is_inference() for leaf in leaves):
        _refuse_unwritable(own)
    if not all(leaf.is_contiguous() or one_place_each(leaf) for leaf in leaves):
        path = next(path for path, leaf in _named(own) if not one_place_each(leaf))
        raise RecordError(
            f"elements of {path} stand in one place, as expand() makes them, and {role!r} is updated in place; clone it"
        )
    mine = {_storage(leaf) for leaf in leaves}
    if len(mine) < len(leaves):
        _refuse_overlap(own)
    others = dict(zip(("params", "optim", "snapshots"), _others(state, role), strict=True))
    if not mine.isdisjoint(_storage(leaf) for leaf in _tensors(others)):
        first, second = _shared(own, others)
        raise RecordError(
            f"{first} and {second} share memory, and {role!r} is updated in place; put a copy there, as snapshot(params) makes it"
        )


def _refuse_unwritable(value: Mapping[str, Any]) -> None:
    """Refuses leaves that torch lets nobody write to."""
    for path, leaf in _named(value):
        if leaf.requires_grad:
            raise RecordError(
                f"{path} requires a gradient, as parameters of a module do, and cannot be updated in place; put its detach() there"
            )
        if leaf.is_inference():
            raise RecordError(
                f"{path} was made in inference mode and cannot be updated in place; clone it outside of that"
            )


def _others(state: TrainState, role: str) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Parameters and moments of other roles, and snapshots."""
    params, optim = ({name: own for name, own in all_.items() if name != role} for all_ in (state.params, state.optim))
    return params, optim, state.snapshots


def _tensors(value: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Those that take memory."""
    return (leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel())


def _named(value: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    named = tree.leaves_with_path(value)
    return [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _storage(leaf: torch.Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


def _refuse_overlap(value: Mapping[str, Any]) -> None:
    """Refuses two leaves that have a byte in common; parts of one storage may lie side by side."""
    for first, second in overlaps([place(path, ("", ""), leaf) for path, leaf in _named(value)]):
        what = "are one tensor" if first.same(second) else "share memory"
        raise RecordError(f"{first.path} and {second.path} {what}, which is updated in place; clone one of them")


def _shared(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """The first two leaves of either that are in one storage."""
    places = {_storage(leaf): path for path, leaf in _named(one)}
    return next((places[_storage(leaf)], path) for path, leaf in _named(other) if _storage(leaf) in places)
