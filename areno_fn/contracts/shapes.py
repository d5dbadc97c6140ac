"""Checks of shapes that several records share."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import shown


def require_vectors(value: object, *names: str) -> None:
    """Refuses fields that are not vectors of one length; a field that is None is passed over.

    A column in the place of a vector would otherwise broadcast against the others and change a sum unnoticed.

    Raises:
        RecordError: names the fields and their shapes.
    """
    found = {name: getattr(value, name) for name in names if getattr(value, name) is not None}
    if any(x.ndim != 1 for x in found.values()) or len({x.shape[0] for x in found.values()}) > 1:
        listed = ", ".join(f"{name} {shown(x)}" for name, x in found.items())
        raise RecordError(f"{type(value).__name__}: these must be vectors of one length, received {listed}")


def require_scalar(tensor: torch.Tensor, name: str) -> None:
    """Refuses a tensor that is not one floating number.

    Raises:
        RecordError: names it and its shape.
    """
    if tensor.ndim or not tensor.is_floating_point():
        raise RecordError(f"{name} must be one floating number, shape [], received {shown(tensor)}")


def require_latents(value: object, like: torch.Tensor, *names: str) -> None:
    """Refuses fields that are not of the shape of the latents beside them; a field that is None is passed over.

    Raises:
        RecordError: names the field and both shapes.
    """
    for name in names:
        found = getattr(value, name)
        if found is not None and found.shape != like.shape:
            raise RecordError(f"{type(value).__name__}.{name} is {shown(found)}, but the latents are {shown(like)}")
