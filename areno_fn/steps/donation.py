"""What must hold of a state whose memory a step may write to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.state import TrainState


def require_alone(state: TrainState, role: str) -> None:
    """Refuses a state in which something else stands in the memory of a role's parameters or moments.

    Within the role no two leaves may begin at one address; other roles and snapshots may share no storage with it.

    Raises:
        RecordError: names both.
    """
    own = {"params": {role: state.params[role]}, "optim": {role: state.optim[role]}}
    addresses = [leaf.data_ptr() for leaf in _tensors(own)]
    if len(set(addresses)) < len(addresses):
        first, second = _twice(own)
        raise RecordError(f"{first} and {second} are one tensor, which is updated in place; clone one of them")
    others = {
        "params": {name: tree for name, tree in state.params.items() if name != role},
        "optim": {name: tree for name, tree in state.optim.items() if name != role},
        "snapshots": state.snapshots,
    }
    mine = {_storage(leaf) for leaf in _tensors(own)}
    if not mine.isdisjoint(_storage(leaf) for leaf in _tensors(others)):
        first, second = _shared(own, others)
        raise RecordError(
            f"{first} and {second} share memory, and {role!r} is updated in place; put a copy there, as snapshot(params) makes it"
        )


def _tensors(value: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Those that take memory."""
    return (leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel())


def _named(value: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    named = tree.leaves_with_path(value)
    return [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _storage(leaf: torch.Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


def _twice(value: Mapping[str, Any]) -> tuple[str, str]:
    """The first two leaves that begin at one address."""
    seen: dict[int, str] = {}
    for path, leaf in _named(value):
        if leaf.data_ptr() in seen:
            return seen[leaf.data_ptr()], path
        seen[leaf.data_ptr()] = path
    raise AssertionError("no two leaves begin at one address")


def _shared(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """The first two leaves of either that are in one storage."""
    places = {_storage(leaf): path for path, leaf in _named(one)}
    return next((places[_storage(leaf)], path) for path, leaf in _named(other) if _storage(leaf) in places)
