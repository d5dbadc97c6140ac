"""Placements: how a leaf is dealt to tensor-parallel ranks. Each is a layout, so it has an inverse too.

`shard(leaf, spec, placement, ranks)` maps one leaf to one tensor a rank; its inverse merges them, and demands that
what several ranks hold is the same. Ranks that cannot be served evenly are refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout import Iso, Specs, TensorSpec, concat, pad, product, replicate, split


@attrs.frozen
class Replicated:
    """Every rank holds all of it: norms, and biases that one rank adds."""


@attrs.frozen
class Split:
    """Equal slices along a dimension: 0 for a column-parallel weight [out, in], 1 for a row-parallel one."""

    dim: int = 0


@attrs.frozen
class Block:
    """A block of a fused leaf.

    Attributes:
        size: along the fused dimension.
        heads: heads that must stay whole; 0 where the block may be cut anywhere.
        copied: fewer heads than ranks are held by several ranks each, as keys and values are; otherwise there
            must be as many as ranks, because what heads give is added up.
    """

    size: int
    heads: int = 0
    copied: bool = False


@attrs.frozen
class Fused:
    """Blocks laid along a dimension, each dealt to the ranks apart, so that a rank holds its part of every block."""

    blocks: tuple[Block, ...]
    dim: int = 0


@attrs.frozen
class Vocabulary:
    """Equal slices along a dimension, after padding it with zeros to a multiple of the ranks."""

    dim: int = 0


Placement = Replicated | Split | Fused | Vocabulary


def grouped(heads: int, kv_heads: int, head_dim: int) -> Fused:
    """The placement of a fused q, k, v weight or bias of grouped-query attention."""
    kv = Block(kv_heads * head_dim, kv_heads, copied=True)
    return Fused((Block(heads * head_dim, heads), kv, kv))


def pairs(size: int) -> Fused:
    """The placement of two blocks of equal size, such as gate and up."""
    return Fused((Block(size), Block(size)))


def rank_name(rank: int, leaf: str) -> str:
    """The key of what a rank holds of a leaf."""
    return f"{rank}/{leaf}"


def shard(leaf: str, spec: TensorSpec, placement: Placement, ranks: int) -> Iso:
    """From a leaf to what each rank holds of it.

    Args:
        leaf: its key; `rank_name` makes the keys of the parts.
        spec: of the whole leaf.
        placement: how it is dealt.
        ranks: how many there are, at least 1.

    Raises:
        LayoutError: the leaf cannot be dealt to so many ranks; says which size or number of heads is in the way.
    """
    if type(ranks) is not int or ranks < 1:
        raise LayoutError(f"{leaf!r} cannot be dealt to {ranks!r} ranks; at least 1 is needed")
    names = [rank_name(rank, leaf) for rank in range(ranks)]
    match placement:
        case Replicated():
            return replicate(leaf, names, spec)
        case Split(dim):
            return _evenly(leaf, names, spec, dim)
        case Vocabulary(dim):
            size = _size(leaf, spec, dim)
            padded = f"{leaf}/padded"
            wider = pad(leaf, padded, spec, size + -size % ranks, dim)
            return wider >> _evenly(padded, names, wider.target[padded], dim)
        case Fused(blocks, dim):
            return _fused(leaf, names, spec, blocks, dim)
    raise LayoutError(f"{leaf!r} cannot be dealt by {placement!r}, which is no placement")


def place(specs: Specs, placements: Mapping[str, Placement], ranks: int) -> Iso:
    """A whole parameter tree dealt to ranks, for example `family.layout(config) >> place(...)`.

    Raises:
        LayoutError: lists the leaves without a placement, the placements without a leaf, and every leaf that
            cannot be dealt to so many ranks.
    """
    problems = [f"{name!r} has no placement" for name in specs if name not in placements]
    problems += [f"a placement is given for {name!r}, which is no leaf" for name in placements if name not in specs]
    made = []
    for name in [name for name in specs if name in placements]:
        try:
            made.append(shard(name, specs[name], placements[name], ranks))
        except LayoutError as error:
            problems.append(str(error))
    if problems:
        raise LayoutError(f"the leaves cannot be dealt to {ranks} ranks: {'; '.join(problems)}")
    return product(made)


def _evenly(source: str, names: list[str], spec: TensorSpec, dim: int) -> Iso:
    size, ranks = _size(source, spec, dim), len(names)
    if size % ranks:
        raise LayoutError(f"{source!r} is {spec}: its dimension {dim} cannot be dealt evenly to {ranks} ranks")
    return split(source, dict.fromkeys(names, spec.resized(dim, size // ranks)), dim)


def _fused(leaf: str, names: list[str], spec: TensorSpec, blocks: tuple[Block, ...], dim: int) -> Iso:
    if sum(block.size for block in blocks) != _size(leaf, spec, dim):
        sizes = " + ".join(str(block.size) for block in blocks)
        raise LayoutError(f"{leaf!r} is {spec}: its dimension {dim} is not {sizes}, which its placement says")
    parts = {f"{leaf}/block{number}": spec.resized(dim, block.size) for number, block in enumerate(blocks)}
    dealt = [_block(leaf, part, parts[part], block, names, dim) for part, block in zip(parts, blocks, strict=True)]
    joined = [
        concat(
            {f"{part}/{name}": iso.target[f"{part}/{name}"] for part, iso in zip(parts, dealt, strict=True)}, name, dim
        )
        for name in names
    ]
    return split(leaf, parts, dim) >> product(dealt) >> product(joined)


def _block(leaf: str, part: str, spec: TensorSpec, block: Block, names: list[str], dim: int) -> Iso:
    """From one block to `part/name` for every rank."""
    ranks, held = len(names), [f"{part}/{name}" for name in names]
    if not block.heads:
        return _evenly(part, held, spec, dim)
    if block.size % block.heads:
        raise LayoutError(f"{leaf!r}: a block of {block.size} rows is not a multiple of its {block.heads} heads")
    if block.heads % ranks and (not block.copied or ranks % block.heads):
        wanted = "one number must divide the other" if block.copied else "their number must be a multiple of the ranks"
        raise LayoutError(f"{leaf!r}: {block.heads} heads cannot be dealt to {ranks} ranks; {wanted}")
    if block.heads >= ranks:
        return _evenly(part, held, spec, dim)
    heads = {f"{part}/head{head}": spec.resized(dim, block.size // block.heads) for head in range(block.heads)}
    each = ranks // block.heads
    copies = [
        replicate(head, held[number * each : (number + 1) * each], heads[head]) for number, head in enumerate(heads)
    ]
    return split(part, heads, dim) >> product(copies)


def _size(leaf: str, spec: TensorSpec, dim: int) -> int:
    if not 0 <= dim < len(spec.shape):
        raise LayoutError(f"{leaf!r} is {spec}, which has no dimension {dim} to deal to ranks")
    return spec.shape[dim]
