"""Layouts as tables: a row says which tensors of a file make a leaf, in which order, and how ranks share it.

A family declares rows in its `checkpoint.py` and sizes for their names; a `Table` of sections reads them, as a layout
and as placements. One line of a table:

    row("qkv", "column", "hidden", "self_attn.q_proj.weight q", "self_attn.k_proj.weight kv", "self_attn.v_proj.weight kv")

is the leaf `qkv` with "hidden" columns, made of three tensors laid below each other with "q", "kv" and "kv" rows.
A tensor that is itself fused in the file says so: "query_key_value.weight q+kv+kv". Where a leaf is placed:

    ""         every rank holds all of it
    "column"   ranks share its rows, those of each block apart
    "row"      ranks share its columns
    "vocab"    ranks share its rows, padded to a multiple of them

Experts are shared like other matrices, every rank holding a part of each, or whole, every rank holding some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout import (
    Iso,
    TensorSpec,
    concat,
    deinterleave,
    identity,
    product,
    rename,
    reshape,
    stack,
    tie,
)
from areno_fn.contracts.placement import Block, Fused, Placement, Replicated, Split, Vocabulary

HEAD = "lm_head.weight"
"""The file's name of the output matrix, in every family."""


@attrs.frozen
class Size:
    """A size that a table names.

    Attributes:
        count: how many.
        heads: heads among them that no rank may cut; 0 where a cut may fall anywhere.
        copied: fewer heads than ranks are held by several ranks each.
    """

    count: int
    heads: int = 0
    copied: bool = False


@attrs.frozen
class Row:
    """One leaf.

    Attributes:
        leaf: its name in its section.
        place: how ranks share it, as the module says.
        columns: the name of its last size; empty for a vector.
        parts: the tensors it is made of, each with the names of the sizes along its rows.
        when: the flag of the configuration without which it does not exist; empty: always.
        experts: the name of the number of experts that are stacked in it; empty: it is one matrix. Their number
            stands for {e} in the names of the parts.
        packed: the name of the tensor that is all experts' already, in files that have it.
        channels: the file's tensors have a middle size of 1, as the weights of a depthwise convolution do.
    """

    leaf: str
    place: str
    columns: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    when: str = ""
    experts: str = ""
    packed: str = ""
    channels: bool = False


@attrs.frozen
class Dealt:
    """A tensor of the file whose rows belong to several leaves in turn, block by block; its parts are `file/part`.

    Attributes:
        file: its name.
        blocks: the name of the number of blocks.
        columns: the name of its last size; empty for a vector.
        parts: their names, each with that of the size of its rows.
        when: as for a `Row`.
    """

    file: str
    blocks: str
    columns: str
    parts: tuple[tuple[str, str], ...]
    when: str = ""


def row(leaf: str, place: str, columns: str, *parts: str, when: str = "") -> Row:
    """A `Row` as a line of a table; a part is written "name rows"."""
    return Row(leaf, place, columns, _parts(parts), when)


def channels(leaf: str, place: str, columns: str, *parts: str, when: str = "") -> Row:
    """Weights of a depthwise convolution: [channels, 1, width] in the file, [channels, width] in the leaf."""
    return Row(leaf, place, columns, _parts(parts), when, channels=True)


def experts(leaf: str, place: str, columns: str, *parts: str, packed: str, when: str = "") -> Row:
    """The matrices of all experts, stacked: one tensor per expert in the file, or one tensor `packed`."""
    for name, _ in _parts(parts):
        if "{e}" not in name:
            raise LayoutError(
                f"the row of {leaf!r} is of experts, so the name {name!r} needs an {{e}} for their number"
            )
    return Row(leaf, place, columns, _parts(parts), when, experts="experts", packed=packed)


def packed(leaf: str, place: str, columns: str, part: str, *, when: str = "") -> Row:
    """The matrices of all experts in one tensor, in every file."""
    ((name, rows),) = _parts([part])
    return Row(leaf, place, columns, ((name, rows),), when, experts="experts", packed=name)


def dealt(file: str, blocks: str, columns: str, *parts: str, when: str = "") -> Dealt:
    """A `Dealt` as a line of a table; a part is written "name rows"."""
    return Dealt(file, blocks, columns, tuple(map(_pair, parts)), when)


def _parts(parts: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(rows.split("+"))) for name, rows in map(_pair, parts))


def _pair(part: str) -> tuple[str, str]:
    words = part.split()
    if len(words) != 2:
        raise LayoutError(
            f"a part of a row is a tensor's name and its rows, such as 'norm.weight hidden', not {part!r}"
        )
    return words[0], words[1]


def _sized(sizes: Mapping[str, Size | int]) -> dict[str, Size]:
    return {name: size if isinstance(size, Size) else Size(size) for name, size in sizes.items()}


@attrs.frozen
class Section:
    """Rows that share a place in the file and in the tree, such as those of a layer.

    Attributes:
        file, tree: what stands before the names of tensors and of leaves.
        rows: its part of the table.
        sizes: what the names of sizes stand for; plain numbers have no heads.
        words: what the words in braces in the names of tensors stand for.
    """

    file: str
    tree: str
    rows: tuple[Row | Dealt, ...]
    sizes: Mapping[str, Size] = attrs.field(converter=_sized)
    words: Mapping[str, str] = attrs.field(factory=dict)

    def layout(self, names: Collection[str]) -> Iso:
        """From the tensors of the file, of which `names` are known to be there, to the leaves."""
        leaves = product(self._leaf(r, names) for r in self.rows if isinstance(r, Row))
        parts = [self._dealt(r) for r in self.rows if isinstance(r, Dealt)]
        made = {name for part in parts for name in part.target}
        others = {name: spec for name, spec in leaves.source.items() if name not in made}
        return product([*parts, identity(others)]) >> leaves if parts else leaves

    def placements(self, *, whole_experts: bool = False) -> dict[str, Placement]:
        """How ranks share each leaf; with `whole_experts`, every rank holds some experts and those whole."""
        return {
            self.tree + r.leaf: Split(0) if r.experts and whole_experts else self._placement(r)
            for r in self.rows
            if isinstance(r, Row)
        }

    def _leaf(self, r: Row, names: Collection[str]) -> Iso:
        target = self.tree + r.leaf
        if not r.experts:
            return self._joined(r, target, 0)
        count = self.sizes[r.experts].count
        if self._file(r.packed) in names or r.parts[0][0] == r.packed:
            rows = sum(self._count(n) for _, sizes in r.parts for n in sizes)
            return rename(self._file(r.packed), target, TensorSpec((count, rows, self._count(r.columns))))
        each = [self._joined(r, f"{target}/{e}", e) for e in range(count)]
        spec = next(iter(each[0].target.values()))
        return product(each) >> stack([f"{target}/{e}" for e in range(count)], target, spec)

    def _joined(self, r: Row, target: str, expert: int) -> Iso:
        """One matrix or vector: its parts, one below the other."""
        files = {self._file(name, expert): sum(self._count(n) for n in rows) for name, rows in r.parts}
        if len(files) < len(r.parts):
            raise LayoutError(f"the row of {r.leaf!r} names a tensor twice: {', '.join(name for name, _ in r.parts)}")
        columns = (self._count(r.columns),) if r.columns else ()
        specs = {name: TensorSpec((rows, *columns)) for name, rows in files.items()}
        if not r.channels:
            return _below(specs, target)
        joined = _below({f"{name}/flat": spec for name, spec in specs.items()}, target)
        squeezed = (
            reshape(name, f"{name}/flat", TensorSpec((spec.shape[0], 1, *spec.shape[1:])), spec.shape)
            for name, spec in specs.items()
        )
        return product(squeezed) >> joined

    def _dealt(self, r: Dealt) -> Iso:
        columns = (self._count(r.columns),) if r.columns else ()
        source = self._file(r.file)
        parts = {f"{source}/{name}": TensorSpec((self._count(rows), *columns)) for name, rows in r.parts}
        return deinterleave(source, parts, self._count(r.blocks))

    def _placement(self, r: Row) -> Placement:
        stacked = 1 if r.experts else 0
        match r.place:
            case "":
                return Replicated()
            case "column":
                return self._shared([name for _, rows in r.parts for name in rows], stacked)
            case "row":
                return self._shared([r.columns], 1 + stacked)
            case "vocab":
                return Vocabulary(0)
        raise LayoutError(f"the row of {r.leaf!r} has the place {r.place!r}; it can be column, row, vocab or empty")

    def _shared(self, names: Sequence[str], dim: int) -> Placement:
        sizes = [self.sizes[name] for name in names]
        if len(sizes) == 1 and not sizes[0].heads:
            return Split(dim)
        return Fused(tuple(Block(size.count, size.heads, size.copied) for size in sizes), dim)

    def _file(self, name: str, expert: int = 0) -> str:
        return self.file + name.format(e=expert, **self.words)

    def _count(self, name: str) -> int:
        if name not in self.sizes:
            raise LayoutError(f"a row names the size {name!r}, but the sizes are {', '.join(map(repr, self.sizes))}")
        return self.sizes[name].count


def _below(specs: Mapping[str, TensorSpec], target: str) -> Iso:
    """One or several tensors, one below the other."""
    return concat(specs, target) if len(specs) > 1 else rename(next(iter(specs)), target, *specs.values())


@attrs.frozen
class Table:
    """A whole model.

    Attributes:
        sections: everything but the embedding and the head.
        embed: the file's name of the embedding.
        vocabulary: its shape, [V, D].
        names: what is in the file.
        tied: the configuration says that the embedding is the output matrix as well.
    """

    sections: tuple[Section, ...]
    embed: str
    vocabulary: tuple[int, int]
    names: Collection[str]
    tied: bool

    @property
    def layout(self) -> Iso:
        """From the tensors of the file to the leaves of the tree.

        The head follows the file: without `lm_head.weight` the embedding serves as the head, whatever the
        configuration says, so that no head is ever left random; with it, it is a leaf of its own, unless the
        configuration ties it: then both tensors are one leaf, must be equal, and are both written back.
        """
        spec = TensorSpec(self.vocabulary)
        ends = [tie("embed", (self.embed, HEAD) if self.tied and HEAD in self.names else (self.embed,), spec)]
        if self._own_head:
            ends.append(rename(HEAD, "head", spec))
        return product([*ends, *(section.layout(self.names) for section in self.sections)])

    def placements(self, *, whole_experts: bool = False) -> dict[str, Placement]:
        """How ranks share each leaf; with `whole_experts`, every rank holds some experts and those whole."""
        ends: dict[str, Placement] = dict.fromkeys(["embed", "head"] if self._own_head else ["embed"], Vocabulary(0))
        for section in self.sections:
            ends |= section.placements(whole_experts=whole_experts)
        return ends

    @property
    def _own_head(self) -> bool:
        return HEAD in self.names and not self.tied


def chosen(config: object, rows: Iterable[Row | Dealt]) -> tuple[Row | Dealt, ...]:
    """The rows whose flags the configuration has set."""
    return tuple(r for r in rows if not r.when or getattr(config, r.when))


def prefix(names: Collection[str], embed: str, prefixes: Sequence[str]) -> str:
    """What stands before the names of the text model: the one of `prefixes` under which the file has `embed`.

    Raises:
        LayoutError: the file has it under none of them, or under several.
    """
    wanted = [before + embed for before in prefixes]
    found = [name for name in wanted if name in names]
    if len(found) > 1:
        raise LayoutError(f"the file has {' and '.join(map(repr, found))}, but a model has one embedding")
    if not found:
        raise LayoutError(
            f"the file has no tensor {' or '.join(map(repr, wanted))}, so it holds no model of this family"
        )
    return found[0].removesuffix(embed)


def word(names: Collection[str], *choices: str) -> str:
    """The first of several words that stands between the dots of some name; the first of all if none does."""
    used = {part for name in names for part in name.split(".")}
    return next((choice for choice in choices if choice in used), choices[0])
