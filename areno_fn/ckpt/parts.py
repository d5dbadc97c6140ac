"""Which tensor of a state goes into which file: one file for each part, so that a part can be looked at alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import quote

from areno_fn.ckpt.trees import branches, walk
from areno_fn.contracts.state import TrainState

_BY_NAME = ("params", "optim", "snapshots")


def files(state: TrainState, tensors: Collection[str]) -> dict[str, list[str]]:
    """The names of the files of a state, each with the paths of its tensors.

    `params`, `optim` and `snapshots` have a file for each of their names, as in `params.actor.safetensors`; what
    else holds tensors is a file itself.

    Args:
        state: the state.
        tensors: paths of those that are stored; the others are aliases of them.
    """
    found: dict[str, list[str]] = {}
    for name, part in _parts(state):
        own = [path for path, _, _ in walk(part, name) if path in tensors]
        if own:
            found[f"{quote(name, safe='')}.safetensors"] = own
    return found


def _parts(state: TrainState) -> list[tuple[str, Any]]:
    found = []
    for field, value in branches(state) or ():
        inner = branches(value) if field in _BY_NAME else None
        found += [(field, value)] if inner is None else [(f"{field}.{name}", part) for name, part in inner]
    return found
