"""`with_master`: the one place where parameters move, in float32 whatever they are stored in."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.record import record, replace
from areno_fn.steps.optimizers.chain import reports
from areno_fn.steps.optimizers.guard import both, like_parameters
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


def with_master(transform: Transform, *, kept: bool = True) -> Optimizer:
    """The optimizer that adds a transform's updates to float32 masters and casts parameters from them.

    In bfloat16 an update below 2^-8 of a weight rounds away. The masters are therefore the truth, and the
    parameters of lower precision are derived from them anew after every update. Gradients are taken to
    float32 first, and the transform sees the masters as its parameters.

    Args:
        transform: what it does with gradients.
        kept: without it masters are made of the parameters for every update and not kept, so that what an update adds
            is rounded to the dtype of the parameters.

    Applying it raises `RecordError` where gradients or updates have not the structure and the shapes of the parameters.
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
        master = {path: leaf.float() for path, leaf in named if _is_low(leaf) and kept}
        return MasterState(master=master, inner=transform.init(_masters(params, master)))

    def apply(gradients: Any, state: MasterState, params: Any) -> tuple[Any, MasterState, dict[str, torch.Tensor]]:
        masters = _masters(params, state.master) if kept else tree.map(wide, params)
        slopes = [wide(leaf) for leaf in like_parameters(gradients, params, "the gradient")]
        updates, inner = both(transform.update(tree.unflatten(params, slopes), state.inner, masters))
        old = tree.leaves(masters)
        moves = zip(like_parameters(updates, masters, "an optimizer's update"), old, strict=True)
        moved = tree.unflatten(params, torch._foreach_add(old, [move.to(leaf.dtype) for move, leaf in moves]))
        master = {path: leaf for path, leaf in tree.leaves_with_path(moved) if path in state.master}
        stored = tree.map(lambda new, old: new.to(old.dtype), moved, params)
        return stored, MasterState(master=master, inner=inner), reports(inner)

    return Optimizer(init=init, apply=apply)


def masters_of(params: Any, state: Any) -> Any:
    """What an optimizer moves: the masters of parameters that are stored in less, and the others themselves.

    Args:
        params: what the optimizer moved last; that is not checked, as `in_full` does.
        state: its state; an optimizer without masters moves the parameters themselves.
    """
    return _masters(params, state.master) if isinstance(state, MasterState) else params


def in_full(params: Any, state: Any) -> Any:
    """Parameters in the precision in which they are moved: the masters of those that are stored in less.

    Args:
        params: what the optimizer moved last.
        state: its state; of an optimizer without masters, or of other parameters, nothing is taken.
    """
    master = state.master if isinstance(state, MasterState) else {}

    def one(path: str, leaf: Any) -> Any:
        return master[path] if _is_of(master.get(path), leaf) else leaf

    return tree.map_with_path(one, params)


def continued(fresh: Any, before: Any, params: Any) -> Any:
    """A fresh optimizer state that goes on from the masters of the one before, where it has those of `params`.

    Parameters in bfloat16 do not show what many small updates have added up to; it is not lost where a phase ends.
    """
    if not (isinstance(fresh, MasterState) and isinstance(before, MasterState)):
        return fresh
    kept = {
        path: before.master[path]
        for path, leaf in tree.leaves_with_path(params)
        if _is_of(before.master.get(path), leaf)
    }
    return replace(fresh, master=fresh.master | kept)


def _is_of(master: torch.Tensor | None, leaf: Any) -> bool:
    """Whether a parameter has been derived from a master."""
    if master is None or not isinstance(leaf, torch.Tensor) or master.shape != leaf.shape or leaf.is_meta:
        return False
    return torch.equal(master.to(leaf.dtype), leaf)


def _masters(params: Any, master: dict[str, torch.Tensor]) -> Any:
    return tree.map_with_path(lambda path, leaf: master.get(path, leaf), params)


def _is_low(leaf: torch.Tensor) -> bool:
    return torch.promote_types(leaf.dtype, torch.float32) != leaf.dtype
