"""`guarded`: a transform of a user's own, held to what every transform keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.record import shown


def guarded(transform: Transform) -> Transform:
    """The same transform, refused where it does not keep what is written of transforms.

    Its functions take `(params)` and `(updates, state, params)`, which is seen before they are called. An update returns
    updates and a state, and the state keeps structure, shapes and dtypes, or a checkpoint could not be read into the one
    that it begins with. It writes to nothing that it is given: a snapshot may be the very tensors of the parameters, and
    the masters of float32 parameters are those too, so a write would quietly change a reference. Torch counts the writes
    to every tensor, so that watching costs nothing.

    Raises:
        SpecError: a function cannot be called so.
        RecordError: from an update that does something else.
    """
    _require_takes(transform.init, "init", "params")
    _require_takes(transform.update, "update", "updates", "state", "params")

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        given = tree.leaves_with_path({"params": params, "state": state})
        before = [_writes(leaf) for _, leaf in given]
        moved, after = both(transform.update(updates, state, params))
        for (path, leaf), count in zip(given, before, strict=True):
            if _writes(leaf) != count:
                raise RecordError(
                    f"the update of an optimizer wrote to {path} in place; it must return updates and a state in new tensors"
                )
        difference = tree.first_difference(_kinds(state), _kinds(after))
        if difference is not None:
            raise RecordError(
                f"the update of an optimizer changed its state at {difference}; a state keeps structure, shapes and dtypes, "
                f"so let init make it as it will be"
            )
        return moved, after

    return Transform(init=transform.init, update=update)


def both(result: Any) -> tuple[Any, Any]:
    """What an update returned.

    Raises:
        RecordError: it is no pair.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        number = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise RecordError(
            f"the update of an optimizer returned a {type(result).__name__}{number}; it must return (updates, state)"
        )
    updates, state = result
    return updates, state


def like_parameters(values: Any, params: Any, what: str) -> list[torch.Tensor]:
    """The leaves of a tree in the order of the parameters, each of the shape of its own.

    Raises:
        RecordError: the structures differ, or a leaf is no tensor of that shape.
    """
    try:
        leaves = tree.leaves(tree.map(lambda _, value: value, params, values))
    except ValueError as error:
        raise RecordError(
            f"{what} is not made like the parameters: {error}; it must have a leaf for every one"
        ) from None
    for (path, own), leaf in zip(tree.leaves_with_path(params), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.shape != own.shape:
            raise RecordError(
                f"{what} of {path} is {shown(leaf)}, and the parameter {shown(own)}; it must have its shape"
            )
    return leaves


def _require_takes(function: Callable[..., Any], name: str, *arguments: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions that are not written in Python do not say
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise SpecError(
            f"the {name} of an optimizer of one's own takes ({', '.join(arguments)}), but this one takes {signature}"
        ) from None


def _kinds(state: Any) -> Any:
    """The same tree with a text for every leaf, of its kind alone."""
    return tree.map(lambda leaf: shown(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__, state)


def _writes(leaf: Any) -> int:
    """How often a tensor's memory was written to; a tensor made in inference mode is not counted."""
    counted = isinstance(leaf, torch.Tensor) and not leaf.is_inference() and not torch.compiler.is_compiling()
    return leaf._version if counted else 0
