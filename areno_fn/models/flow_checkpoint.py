"""How the state dict of a flow-matching transformer is declared: tables of rows, and what is read out of them.

The forward of these models is a module of diffusers that is called as a function, so a leaf has the name of the
tensor in the file and there is one leaf a tensor. A family declares its tables in `<family>/checkpoint.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import attrs

from areno_fn.contracts.layout import Iso, TensorSpec, identity
from areno_fn.contracts.placement import Block, Fused, Placement, Replicated, Split

Sizes = Mapping[str, int]


@attrs.frozen
class Cut:
    """How a tensor is dealt to tensor-parallel ranks; `rows` and `columns` write one.

    Attributes:
        dim: the dimension that is cut.
        blocks: what lies along it, each block dealt apart: "size", or "size/heads" where heads stay whole.
    """

    dim: int
    blocks: tuple[str, ...]


def rows(*blocks: str) -> Cut:
    """Cut along the outputs of a linear layer; its bias is cut with it."""
    return Cut(0, blocks)


def columns(*blocks: str) -> Cut:
    """Cut along the inputs of a linear layer; every rank holds the bias."""
    return Cut(1, blocks)


@attrs.frozen
class Row:
    """One tensor.

    Attributes:
        name: in the file, within its block.
        shape: sizes by name, as in "width", "256", "6*width" or "3*width+2*inner".
        cut: how ranks share it; None: every rank holds all of it.
        when: flags, separated by spaces, that must all be set ("flag") or not set ("!flag") for it to exist.
        buffer: it is stored, but not a parameter: nothing trains it.
    """

    name: str
    shape: tuple[str, ...]
    cut: Cut | None = None
    when: str = ""
    buffer: bool = False


def tensor(name: str, *shape: str, cut: Cut | None = None, when: str = "", buffer: bool = False) -> tuple[Row, ...]:
    """A line of a table: one tensor."""
    return (Row(name, shape, cut, when, buffer),)


def linear(
    name: str, outputs: str, inputs: str, *, cut: Cut | None = None, when: str = "", bias: str = "always"
) -> tuple[Row, ...]:
    """A line of a table: the weight [outputs, inputs] of a linear layer and its bias [outputs].

    Args:
        name: of the layer.
        outputs, inputs: sizes.
        cut: of the weight.
        when: flags under which the layer exists.
        bias: "always", "never", or the flag under which there is one.
    """
    weight = Row(f"{name}.weight", (outputs, inputs), cut, when)
    if bias == "never":
        return (weight,)
    flags = when if bias == "always" else f"{when} {bias}"
    return weight, Row(f"{name}.bias", (outputs,), cut if cut is not None and cut.dim == 0 else None, flags)


def table(*lines: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of several lines."""
    return tuple(row for line in lines for row in line)


@attrs.frozen
class Leaf:
    """A tensor of a state dict, its sizes known.

    Attributes:
        spec: its shape; the dtype is that of the file.
        placement: how ranks share it.
        buffer: it is stored, but not a parameter.
    """

    spec: TensorSpec
    placement: Placement
    buffer: bool


Leaves = Mapping[str, Leaf]


def read(rows: Iterable[Row], sizes: Sizes, flags: Iterable[str] = (), prefix: str = "") -> dict[str, Leaf]:
    """The tensors of one table.

    Args:
        rows: the table.
        sizes: the sizes that it names.
        flags: those that are set.
        prefix: stands before every name.
    """
    given = set(flags)
    return {prefix + row.name: _leaf(row, sizes) for row in rows if _exists(row, given)}


def repeat(rows: Iterable[Row], sizes: Sizes, blocks: str, count: int, flags: Iterable[str] = ()) -> dict[str, Leaf]:
    """The tensors of `count` equal blocks, `blocks.0.`, `blocks.1.` and so on; the rest as for `read`."""
    one = read(rows, sizes, flags)
    return {f"{blocks}.{number}.{name}": leaf for number in range(count) for name, leaf in one.items()}


def layout(leaves: Leaves) -> Iso:
    """From the tensors of a file to the leaves: the same names."""
    return identity({name: leaf.spec for name, leaf in leaves.items()})


def placements(leaves: Leaves) -> dict[str, Placement]:
    """How ranks share each leaf."""
    return {name: leaf.placement for name, leaf in leaves.items()}


def _exists(row: Row, flags: set[str]) -> bool:
    return all((word.lstrip("!") in flags) != word.startswith("!") for word in row.when.split())


def _leaf(row: Row, sizes: Sizes) -> Leaf:
    return Leaf(TensorSpec(_size(size, sizes) for size in row.shape), _placement(row.cut, sizes), row.buffer)


def _placement(cut: Cut | None, sizes: Sizes) -> Placement:
    if cut is None:
        return Replicated()
    blocks = tuple(_block(text, sizes) for text in cut.blocks)
    return Split(cut.dim) if len(blocks) == 1 and not blocks[0].heads else Fused(blocks, cut.dim)


def _block(text: str, sizes: Sizes) -> Block:
    size, _, heads = text.partition("/")
    return Block(_size(size, sizes), _size(heads, sizes) if heads else 0)


def _size(text: str, sizes: Sizes) -> int:
    """The value of a sum of products of sizes and numbers."""
    return sum(
        math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in term.split("*"))
        for term in text.split("+")
    )
