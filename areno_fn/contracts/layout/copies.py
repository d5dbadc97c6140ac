"""The primitives whose two sides differ in size: one tensor under several names, and padding.

They are bijections between the smaller side and those values of the larger one that it can have: copies that are
equal bit for bit, padding that is zero. Anything else on the larger side is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout.iso import Iso, whole
from areno_fn.contracts.layout.moves import axis_of, distinct, rename
from areno_fn.contracts.layout.specs import Tensors, TensorSpec


def tie(target: str, names: Sequence[str], spec: TensorSpec) -> Iso:
    """One leaf that stands in the file under one or several names.

    Tensors that are given under several names must be equal bit for bit; the inverse gives the leaf under
    every name.

    Raises:
        LayoutError: no names or a name twice; when applied, names both tensors that differ.
    """
    distinct(names, f"tie of {target!r}")
    if len(names) == 1:
        return rename(names[0], target, spec)

    def forward(tensors: Tensors) -> dict[str, torch.Tensor]:
        first = tensors[names[0]]
        for name in names[1:]:
            _require_equal_bits(target, names[0], first, name, tensors[name])
        return {target: first}

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        return dict.fromkeys(names, tensors[target])

    count = len(names)
    return whole(
        dict.fromkeys(names, spec), {target: spec}, forward, backward, f"tie {count} names", f"replicate {count} times"
    )


def replicate(source: str, names: Sequence[str], spec: TensorSpec) -> Iso:
    """One tensor under several names, for example on every rank: the inverse of `tie`."""
    return tie(source, names, spec).inverse


def pad(source: str, target: str, spec: TensorSpec, size: int, dim: int = 0) -> Iso:
    """A tensor with zeros behind it along a dimension, up to `size`; the inverse drops them.

    Raises:
        LayoutError: no such dimension, or `size` is smaller than what is there; when undone, padding that is not
            zero, because dropping it would lose what was trained.
    """
    axis = axis_of(dim, len(spec.shape), f"pad of {source!r}")
    length = spec.shape[axis]
    if size < length:
        raise LayoutError(f"pad of {source!r} to {size} along dimension {axis}: it is {spec}, which is larger")
    wider = spec.resized(axis, size)

    def forward(tensors: Tensors) -> dict[str, torch.Tensor]:
        shape = (*spec.shape[:axis], size - length, *spec.shape[axis + 1 :])
        given = tensors[source]
        return {target: torch.cat([given, given.new_zeros(shape)], axis)}

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        kept, padding = torch.split(tensors[target], [length, size - length], axis)
        if not padding.is_meta and bool(_bits(padding).any()):
            raise LayoutError(
                f"{target!r} is padded from {length} to {size} along dimension {axis}, but the padding is not zero; "
                "what stands there must take no part in training"
            )
        return {source: kept}

    words = f"pad dim {axis} to {size}", f"cut to {length}"
    return whole({source: spec}, {target: wider}, forward, backward, *words, copies=size > length)


def _require_equal_bits(target: str, first: str, a: torch.Tensor, second: str, b: torch.Tensor) -> None:
    if a.is_meta or b.is_meta:
        return
    if not torch.equal(_bits(a), _bits(b)):
        raise LayoutError(
            f"{first!r} and {second!r} are tied, both are the leaf {target!r}, but their values differ; "
            "make them equal, or declare the model untied"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
