"""`with_master`: the one place where parameters move, in float32 whatever they are stored in."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.record import record
from areno_fn.steps.optimizers.chain import reports
from areno_fn.steps.reduce import wide


@record
class MasterState:
    """The state of an optimizer.

    Attributes:
        master: by path, the float32 value of every parameter that is stored in less. A parameter in float32
            or float64 is its own master and does not appear.
        inner: state of the transform.
    """

    master: dict[str, torch.Tensor]
    inner: Any


def with_master(transform: Transform) -> Optimizer:
    """The optimizer that adds a transform's updates to float32 masters and casts parameters from them.

    In bfloat16 an update below 2^-8 of a weight rounds away. The masters are therefore the truth, and the
    parameters of lower precision are derived from them anew after every update. Gradients are taken to
    float32 first, and the transform sees the masters as its parameters.
    """

    def init(params: Any) -> MasterState:
        named = tree.leaves_with_path(params)
        for path, leaf in named:
            if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
                kind = leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise RecordError(
                    f"parameter {path} is of {kind}; an optimizer moves floating-point tensors, "
                    f"so keep it out of a trainable role"
                )
        if not named:
            raise RecordError("an optimizer was given no parameters; a trainable role needs at least one tensor")
        master = {path: leaf.float() for path, leaf in named if _is_low(leaf)}
        return MasterState(master=master, inner=transform.init(_masters(params, master)))

    def apply(gradients: Any, state: MasterState, params: Any) -> tuple[Any, MasterState, dict[str, torch.Tensor]]:
        masters = _masters(params, state.master)
        updates, inner = transform.update(tree.map(lambda g, _: wide(g), gradients, params), state.inner, masters)
        moved = tree.unflatten(params, torch._foreach_add(tree.leaves(masters), tree.leaves(updates)))
        master = {path: leaf for path, leaf in tree.leaves_with_path(moved) if path in state.master}
        stored = tree.map(lambda new, old: new.to(old.dtype), moved, params)
        return stored, MasterState(master=master, inner=inner), reports(inner)

    return Optimizer(init=init, apply=apply)


def _masters(params: Any, master: dict[str, torch.Tensor]) -> Any:
    return tree.map_with_path(lambda path, leaf: master.get(path, leaf), params)


def _is_low(leaf: torch.Tensor) -> bool:
    return torch.promote_types(leaf.dtype, torch.float32) != leaf.dtype
