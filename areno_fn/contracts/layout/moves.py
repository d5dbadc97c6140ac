"""The primitives that move every element once: names, joins, and the order of dimensions and blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout.iso import Iso, bijection, product
from areno_fn.contracts.layout.specs import Specs, Tensors, TensorSpec


def identity(specs: Specs) -> Iso:
    """Every tensor as it is."""
    return product(rename(name, name, spec) for name, spec in specs.items())


def rename(source: str, target: str, spec: TensorSpec) -> Iso:
    """One tensor under another name."""
    return bijection(
        {source: spec},
        {target: spec},
        lambda tensors: {target: tensors[source]},
        lambda tensors: {source: tensors[target]},
        move="rename",
        undo="rename",
    )


def concat(parts: Specs, target: str, dim: int = 0) -> Iso:
    """Tensors laid one after the other along a dimension, in the order of `parts`; sizes along it may differ.

    Raises:
        LayoutError: no parts, no such dimension, or parts that differ in another size or in dtype.
    """
    where = f"concat into {target!r}"
    axis = _common_axis(parts, dim, where)
    sizes = [spec.shape[axis] for spec in parts.values()]
    return bijection(
        dict(parts),
        {target: next(iter(parts.values())).resized(axis, sum(sizes))},
        lambda tensors: {target: torch.cat([tensors[name] for name in parts], axis)},
        lambda tensors: dict(zip(parts, torch.split(tensors[target], sizes, axis), strict=True)),
        move=f"concat dim {axis}",
        undo=f"split dim {axis}",
    )


def split(source: str, parts: Specs, dim: int = 0) -> Iso:
    """A tensor cut along a dimension into `parts`, whose sizes may differ: the inverse of `concat`."""
    return concat(parts, source, dim).inverse


def stack(names: Sequence[str], target: str, spec: TensorSpec, dim: int = 0) -> Iso:
    """Tensors of one shape along a new dimension, in the order of `names`, for example the experts of a layer.

    Args:
        names: of the tensors.
        target: of their stack.
        spec: of each tensor.
        dim: where the new dimension stands in the stack.

    Raises:
        LayoutError: no names, a name twice, or no such dimension.
    """
    where = f"stack into {target!r}"
    distinct(names, where)
    axis = axis_of(dim, len(spec.shape) + 1, where)
    shape = (*spec.shape[:axis], len(names), *spec.shape[axis:])
    return bijection(
        dict.fromkeys(names, spec),
        {target: TensorSpec(shape, spec.dtype)},
        lambda tensors: {target: torch.stack([tensors[name] for name in names], axis)},
        lambda tensors: dict(zip(names, tensors[target].unbind(axis), strict=True)),
        move=f"stack dim {axis}",
        undo=f"unstack dim {axis}",
    )


def unstack(source: str, names: Sequence[str], spec: TensorSpec, dim: int = 0) -> Iso:
    """The slices of a tensor along a dimension: the inverse of `stack`; `spec` is that of a slice."""
    return stack(names, source, spec, dim).inverse


def transpose(source: str, target: str, spec: TensorSpec, dims: Sequence[int] = (1, 0)) -> Iso:
    """Dimensions in another order: dimension i of the target is dimension `dims[i]` of the source.

    Raises:
        LayoutError: `dims` is not an order of the dimensions of `spec`.
    """
    if any(type(dim) is not int for dim in dims) or sorted(dims) != list(range(len(spec.shape))):
        raise LayoutError(f"transpose of {source!r}: {tuple(dims)} is not an order of the dimensions of {spec}")
    back = [list(dims).index(dim) for dim in range(len(dims))]
    return bijection(
        {source: spec},
        {target: TensorSpec((spec.shape[dim] for dim in dims), spec.dtype)},
        lambda tensors: {target: tensors[source].permute(tuple(dims))},
        lambda tensors: {source: tensors[target].permute(tuple(back))},
        move=f"transpose {tuple(dims)}",
        undo=f"transpose {tuple(back)}",
    )


def reshape(source: str, target: str, spec: TensorSpec, shape: Sequence[int]) -> Iso:
    """The same elements in the same order under another shape.

    Raises:
        LayoutError: the shapes hold different numbers of elements.
    """
    made = TensorSpec(tuple(shape), spec.dtype)
    return bijection(
        {source: spec},
        {target: made},
        lambda tensors: {target: tensors[source].reshape(made.shape)},
        lambda tensors: {source: tensors[target].reshape(spec.shape)},
        move=f"reshape {list(made.shape)}",
        undo=f"reshape {list(spec.shape)}",
    )


def interleave(parts: Specs, target: str, blocks: int, dim: int = 0) -> Iso:
    """Tensors laid block by block: the first block of each part, then the second of each, and so on.

    With `blocks` heads and the parts q and gate this is [q_0, gate_0, q_1, gate_1, ...].

    Args:
        parts: their sizes along `dim` may differ, and each is a multiple of `blocks`.
        target: where they are laid.
        blocks: into how many equal pieces each part is cut.
        dim: along which dimension.

    Raises:
        LayoutError: as for `concat`, or a size that is no multiple of `blocks`.
    """
    where = f"interleave into {target!r}"
    axis = _common_axis(parts, dim, where)
    if type(blocks) is not int or blocks < 1:
        raise LayoutError(f"{where} needs a number of blocks of at least 1, received {blocks!r}")
    for name, spec in parts.items():
        if spec.shape[axis] % blocks:
            raise LayoutError(
                f"{where}: dimension {axis} of {name!r}, which is {spec}, cannot be cut into {blocks} blocks"
            )
    sizes = [spec.shape[axis] // blocks for spec in parts.values()]

    def forward(tensors: Tensors) -> dict[str, torch.Tensor]:
        cut = [_cut(tensors[name], axis, blocks, size) for name, size in zip(parts, sizes, strict=True)]
        return {target: torch.cat(cut, axis + 1).flatten(axis, axis + 1)}

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        cut = torch.split(_cut(tensors[target], axis, blocks, sum(sizes)), sizes, axis + 1)
        return {name: piece.flatten(axis, axis + 1) for name, piece in zip(parts, cut, strict=True)}

    return bijection(
        dict(parts),
        {target: next(iter(parts.values())).resized(axis, blocks * sum(sizes))},
        forward,
        backward,
        move=f"interleave {blocks} blocks dim {axis}",
        undo=f"deinterleave {blocks} blocks dim {axis}",
    )


def deinterleave(source: str, parts: Specs, blocks: int, dim: int = 0) -> Iso:
    """A tensor whose blocks belong to `parts` in turn: the inverse of `interleave`."""
    return interleave(parts, source, blocks, dim).inverse


def distinct(names: Sequence[str], where: str) -> None:
    """Refuses a sequence of names that is empty or holds one twice."""
    if not names:
        raise LayoutError(f"{where} needs at least one name")
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise LayoutError(f"{where} names {repeated!r} twice")


def _common_axis(parts: Specs, dim: int, where: str) -> int:
    """The dimension along which `parts` are laid, after checking that they agree in everything else."""
    if not parts:
        raise LayoutError(f"{where} needs at least one part")
    (first, whole), *others = parts.items()
    axis = axis_of(dim, len(whole.shape), where)
    for name, spec in others:
        alike = len(spec.shape) == len(whole.shape) and _without(spec.shape, axis) == _without(whole.shape, axis)
        if not alike or spec.dtype != whole.dtype:
            raise LayoutError(
                f"{where} along dimension {axis}: {name!r} is {spec}, "
                f"which does not continue {first!r}, which is {whole}"
            )
    return axis


def axis_of(dim: int, dims: int, where: str) -> int:
    """A dimension counted from the front, which may have been counted from the back."""
    if type(dim) is not int or not -dims <= dim < dims:
        raise LayoutError(f"{where}: there is no dimension {dim} among {dims}")
    return dim % dims


def _cut(tensor: torch.Tensor, axis: int, blocks: int, size: int) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:axis], blocks, size, *tensor.shape[axis + 1 :])


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
