"""`without_writes`: a transform of a user's own, which may not write to what it is given."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import Transform


def without_writes(transform: Transform) -> Transform:
    """The same transform, refused as soon as it has written to the parameters or to its old state.

    A snapshot may be the very tensors of the parameters, and the masters of float32 parameters are those too, so a write
    would quietly change a reference. Torch counts the writes to every tensor, so that watching costs nothing.
    """

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        given = tree.leaves_with_path({"params": params, "state": state})
        before = [_writes(leaf) for _, leaf in given]
        result = transform.update(updates, state, params)
        for (path, leaf), count in zip(given, before, strict=True):
            if _writes(leaf) != count:
                raise RecordError(
                    f"the update of an optimizer wrote to {path} in place; it must return updates and a state in new tensors"
                )
        return result

    return Transform(init=transform.init, update=update)


def _writes(leaf: Any) -> int:
    """How often a tensor's memory was written to; a tensor made in inference mode is not counted."""
    counted = isinstance(leaf, torch.Tensor) and not leaf.is_inference() and not torch.compiler.is_compiling()
    return leaf._version if counted else 0
