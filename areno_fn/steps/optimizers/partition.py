"""`partition`: several transforms side by side, each for its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.record import record
from areno_fn.steps.optimizers.chain import reports

Label = Callable[[str, torch.Tensor], str]
"""`(path, leaf) -> label`: which transform a parameter belongs to."""


@record
class PartitionState:
    """The states of the transforms by label; a label without parameters has none."""

    inner: dict[str, Any]

    def report(self) -> dict[str, torch.Tensor]:
        """What the transforms report; where several use a name, the first one's value."""
        found: dict[str, torch.Tensor] = {}
        for state in self.inner.values():
            found = reports(state) | found
        return found


@checked
def partition(transforms: Mapping[str, Transform], label: Label) -> Transform:
    """The transform that hands every parameter to the one of `transforms` that its label names.

    Each of them sees its parameters alone, as `{path: leaf}` with the paths of the whole tree, so a mask by path
    means the same inside and outside. Every parameter has one label, so no two transforms can move it.

    Args:
        transforms: by label.
        label: a rule on paths and shapes.

    Raises:
        RecordError: from `init`, where a label names no transform.
    """

    def init(params: Any) -> PartitionState:
        parts = _parts(params, params)
        states = {name: transform.init(parts[name]) for name, transform in transforms.items() if name in parts}
        return PartitionState(inner=states)

    def update(updates: Any, state: PartitionState, params: Any) -> tuple[Any, PartitionState]:
        own, given = _parts(params, params), _parts(params, updates)
        moved: dict[str, torch.Tensor] = {}
        states = {}
        for name, inner in state.inner.items():
            part, states[name] = transforms[name].update(given[name], inner, own[name])
            moved |= part
        moves = [moved[path] for path, _ in tree.leaves_with_path(params)]
        return tree.unflatten(updates, moves), PartitionState(inner=states)

    def _parts(params: Any, values: Any) -> dict[str, dict[str, torch.Tensor]]:
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for (path, leaf), value in zip(tree.leaves_with_path(params), tree.leaves(values), strict=True):
            name = label(path, leaf)
            if name not in transforms:
                raise RecordError(
                    f"parameter {path} has the label {name!r}; the transforms are {', '.join(transforms)}"
                )
            parts.setdefault(name, {})[path] = value
        return parts

    return Transform(init=init, update=update)
