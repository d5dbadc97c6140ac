"""Hypothesis strategies for layouts: compositions of all primitives, and state dicts that a layout takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import (
    Iso,
    Specs,
    TensorSpec,
    concat,
    deinterleave,
    identity,
    interleave,
    pad,
    product,
    rename,
    replicate,
    reshape,
    split,
    stack,
    tie,
    transpose,
    unstack,
)
from areno_fn.contracts.placement import Block, Fused, Placement, Replicated, Split, Vocabulary, shard
from areno_fn.testing.checkpoints import DTYPES, state_dict

Draw = Callable[..., Any]
Names = Iterator[str]
_LARGEST = 6  # pieces that a tensor falls into at once
_DECLARED = (None, None, None, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


@st.composite
def state_dicts(draw: Draw, layout: Iso, *, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, torch.Tensor]:
    """What a file of this layout may hold: exactly its source keys and shapes, any bits, NaNs among them.

    Args:
        layout: from the tensors of the file to the leaves.
        dtypes: of the tensors that declare none; those that one leaf is joined from have one dtype, others differ.
    """
    chosen = draw(st.lists(st.sampled_from(tuple(dtypes)), min_size=1, max_size=len(dtypes)))
    return state_dict(layout, dtypes=chosen, key=Key.of(draw(st.integers(0, 2**63 - 1))))


@st.composite
def isos(draw: Draw, *, max_steps: int = 5) -> Iso:
    """Layouts composed of every primitive: what a file holds is merged, moved several times, and dealt to ranks.

    Copies and padding stand at the two ends, as they do in a checkpoint: tied names and merged ranks at one,
    ranks, copies and padding at the other. Half of the layouts are inverted.

    Args:
        max_steps: most moves between the ends.
    """
    names = iter(f"t{number}" for number in range(10_000))
    dtype = draw(st.sampled_from(_DECLARED))
    dims = draw(st.lists(st.sampled_from((0, 1, 2, 2, 3)), min_size=1, max_size=3))
    shapes = [tuple(draw(st.integers(1, 4)) for _ in range(count)) for count in dims]
    iso = identity({next(names): TensorSpec(shape, dtype) for shape in shapes})
    iso = _ends(draw, iso.target, names).inverse >> iso
    for _ in range(draw(st.integers(0, max_steps))):
        iso = iso >> _step(draw, iso.target, names)
    iso = iso >> _ends(draw, iso.target, names)
    return iso.inverse if draw(st.booleans()) else iso


def _ends(draw: Draw, specs: Specs, names: Names) -> Iso:
    """Each tensor as it is, under several names, padded, or dealt to ranks."""
    return product(
        draw(st.sampled_from((_same, _renamed, _copies, _padded, _ranks)))(draw, *item, names) for item in specs.items()
    )


def _same(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    del draw, names
    return identity({name: spec})


def _renamed(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    del draw
    return rename(name, next(names), spec)


def _copies(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    held = [next(names) for _ in range(draw(st.integers(1, 3)))]
    return tie(name, held, spec).inverse if draw(st.booleans()) else replicate(name, held, spec)


def _padded(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    if not spec.shape:
        return identity({name: spec})
    dim = draw(st.integers(-len(spec.shape), len(spec.shape) - 1))
    return pad(name, next(names), spec, spec.shape[dim] + draw(st.integers(0, 3)), dim)


def _ranks(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    """Dealt to as many ranks as the placement that is drawn allows."""
    del names
    if not spec.shape:
        return shard(name, spec, Replicated(), draw(st.integers(1, 4)))
    dim = draw(st.integers(0, len(spec.shape) - 1))
    size = spec.shape[dim]
    placements: dict[str, Callable[[], tuple[Placement, tuple[int, ...]]]] = {
        "split": lambda: (Split(dim), _divisors(size)),
        "vocabulary": lambda: (Vocabulary(dim), (1, 2, 3, 4, 8)),
        "replicated": lambda: (Replicated(), (1, 2, 3)),
        "fused": lambda: _fused(draw, size, dim),
    }
    placement, ranks = placements[draw(st.sampled_from(sorted(placements)))]()
    return shard(name, spec, placement, draw(st.sampled_from(ranks)))


def _fused(draw: Draw, size: int, dim: int) -> tuple[Placement, tuple[int, ...]]:
    """Blocks along a dimension; copied heads, which may be fewer than the ranks, or rows that are cut anywhere."""
    sizes = _cuts(draw, size)
    if draw(st.booleans()):
        ranks = _divisors(math.gcd(*sizes))
        return Fused(tuple(Block(part) for part in sizes), dim), ranks
    heads = draw(st.sampled_from(_divisors(math.gcd(*sizes))))
    ranks = (*_divisors(heads), 2 * heads)
    return Fused(tuple(Block(part, heads, copied=True) for part in sizes), dim), ranks


def _step(draw: Draw, specs: Specs, names: Names) -> Iso:
    """One move on some of the tensors, the others as they are."""
    name = draw(st.sampled_from(list(specs)))
    alone = (_renamed, _cut, _unstacked, _transposed, _reshaped, _deinterleaved)
    together = (_joined, _stacked, _interleaved)
    if draw(st.booleans()):
        moved = draw(st.sampled_from(alone))(draw, name, specs[name], names)
    else:
        moved = draw(st.sampled_from(together))(draw, name, specs, names)
    return moved | identity({other: spec for other, spec in specs.items() if other not in moved.source})


def _joined(draw: Draw, name: str, specs: Specs, names: Names) -> Iso:
    if not specs[name].shape:
        return rename(name, next(names), specs[name])
    dim = draw(st.integers(0, len(specs[name].shape) - 1))
    return concat(
        _several(draw, name, specs, dim), next(names), draw(st.sampled_from((dim, dim - len(specs[name].shape))))
    )


def _interleaved(draw: Draw, name: str, specs: Specs, names: Names) -> Iso:
    if not specs[name].shape:
        return rename(name, next(names), specs[name])
    dim = draw(st.integers(0, len(specs[name].shape) - 1))
    parts = _several(draw, name, specs, dim)
    blocks = draw(st.sampled_from(_divisors(math.gcd(*(spec.shape[dim] for spec in parts.values())))))
    return interleave(parts, next(names), blocks, dim)


def _stacked(draw: Draw, name: str, specs: Specs, names: Names) -> Iso:
    spec = specs[name]
    same = [other for other in specs if specs[other] == spec and other != name]
    chosen = draw(st.permutations([name, *draw(st.lists(st.sampled_from(same), unique=True))] if same else [name]))
    return stack(chosen, next(names), spec, draw(st.integers(-len(spec.shape) - 1, len(spec.shape))))


def _cut(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    if not spec.shape:
        return rename(name, next(names), spec)
    dim = draw(st.integers(0, len(spec.shape) - 1))
    return split(name, {next(names): spec.resized(dim, size) for size in _cuts(draw, spec.shape[dim])}, dim)


def _unstacked(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    fit = [dim for dim, size in enumerate(spec.shape) if 1 <= size <= _LARGEST]
    if not fit:
        return rename(name, next(names), spec)
    dim = draw(st.sampled_from(fit))
    return unstack(name, [next(names) for _ in range(spec.shape[dim])], _without(spec, dim), dim)


def _transposed(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    return transpose(name, next(names), spec, draw(st.permutations(range(len(spec.shape)))))


def _reshaped(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    shape, rest = [], spec.numel
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from(_divisors(rest))))
        rest //= shape[-1]
    return reshape(name, next(names), spec, (*shape, rest))


def _deinterleaved(draw: Draw, name: str, spec: TensorSpec, names: Names) -> Iso:
    if not spec.shape:
        return rename(name, next(names), spec)
    dim = draw(st.integers(0, len(spec.shape) - 1))
    blocks = draw(st.sampled_from(_divisors(spec.shape[dim])))
    sizes = _cuts(draw, spec.shape[dim] // blocks)
    return deinterleave(name, {next(names): spec.resized(dim, blocks * size) for size in sizes}, blocks, dim)


def _several(draw: Draw, name: str, specs: Specs, dim: int) -> dict[str, TensorSpec]:
    """The tensor and some that agree with it in all dimensions but one, in any order."""
    wanted = specs[name]
    alike = [
        other
        for other, spec in specs.items()
        if other != name and len(spec.shape) == len(wanted.shape) and _without(spec, dim) == _without(wanted, dim)
    ]
    chosen = [name, *draw(st.lists(st.sampled_from(alike), unique=True, max_size=3))] if alike else [name]
    return {other: specs[other] for other in draw(st.permutations(chosen))}


def _cuts(draw: Draw, size: int) -> list[int]:
    """Sizes of at least 1 that add up to `size`."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=_LARGEST - 1))) if size > 1 else []
    edges = [0, *cuts, size]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _without(spec: TensorSpec, dim: int) -> TensorSpec:
    return TensorSpec((*spec.shape[:dim], *spec.shape[dim + 1 :]), spec.dtype)
