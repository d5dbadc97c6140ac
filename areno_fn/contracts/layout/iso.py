"""`Iso`, a bijection between two declared families of tensors: its parts, composition, inversion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout.specs import Move, ParamLayout, Specs, Tensors, TensorSpec, spec_of

_SHOWN = 4


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """An indivisible piece of a layout: these source tensors hold exactly the elements of these target tensors.

    Attributes:
        source, target: what goes in and what comes out.
        needs: for each target key, the source keys whose elements it holds.
        forward, backward: move the elements; results may be views of the arguments.
        move, undo: what the two do, in words.
        copies: an element of one side may stand at several places of the other, or at none if it is padding.
    """

    source: Specs
    target: Specs
    needs: dict[str, tuple[str, ...]]
    forward: Move
    backward: Move
    move: str
    undo: str
    copies: bool = False

    @property
    def inverse(self) -> Part:
        """The same piece, read the other way."""
        return Part(
            source=self.target,
            target=self.source,
            needs={name: tuple(t for t, names in self.needs.items() if name in names) for name in self.source},
            forward=self.backward,
            backward=self.forward,
            move=self.undo,
            undo=self.move,
            copies=self.copies,
        )

    def apply(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The target tensors made of `tensors`, which may hold others as well.

        Raises:
            LayoutError: the tensors differ in dtype or device, so that joining them would convert.
        """
        given = {name: tensors[name] for name in self.source}
        kinds = {(x.dtype, x.device) for x in given.values()}
        if len(kinds) > 1:
            shown = ", ".join(f"{name!r} {spec_of(x)} on {x.device}" for name, x in given.items())
            into = ", ".join(map(repr, self.target))
            raise LayoutError(f"a layout does not convert, but the tensors of {into} are of several kinds: {shown}")
        made = self.forward(given)
        dtype = next(iter(kinds))[0]
        ParamLayout({name: TensorSpec(spec.shape, dtype) for name, spec in self.target.items()}).check(
            made, f"the results of the part that makes {', '.join(map(repr, self.target))}"
        )
        return made


@attrs.frozen(eq=False)
class Iso:
    """A bijection between two declared families of tensors, as independent parts. Build one from the primitives.

    Attributes:
        parts: pieces that share no tensor; a loader can work through them one by one.
        source, target: every tensor of each side.
    """

    parts: tuple[Part, ...]
    source: Specs = attrs.field(init=False)
    target: Specs = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "source", _union((part.source for part in self.parts), "source"))
        object.__setattr__(self, "target", _union((part.target for part in self.parts), "target"))

    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The target tensors, in their declared order.

        Args:
            tensors: exactly the declared source tensors. Results may be views of them.

        Raises:
            LayoutError: lists every tensor that is missing, undeclared, or of another shape or dtype.
        """
        ParamLayout(self.source).check(tensors)
        made: dict[str, torch.Tensor] = {}
        for part in self.parts:
            made |= part.apply(tensors)
        return {name: made[name] for name in self.target}

    @property
    def inverse(self) -> Iso:
        """The same bijection, read the other way."""
        return Iso(tuple(part.inverse for part in self.parts))

    def sources_of(self, target: str) -> tuple[str, ...]:
        """The source keys whose elements the tensor `target` holds.

        Raises:
            LayoutError: there is no such target.
        """
        for part in self.parts:
            if target in part.needs:
                return part.needs[target]
        raise LayoutError(f"{target!r} is no target of this layout")

    def __rshift__(self, then: Iso) -> Iso:
        """`self`, then `then`. Where one ends the other must begin: same keys, shapes and dtypes."""
        given, wanted = self.target, then.source
        problems = [f"the first gives {name!r}, which the second does not take" for name in given if name not in wanted]
        problems += [
            f"the second takes {name!r}, which the first does not give" for name in wanted if name not in given
        ]
        problems += [
            f"the first gives {name!r} as {spec}, the second takes it as {wanted[name]}"
            for name, spec in given.items()
            if name in wanted and wanted[name] != spec
        ]
        if problems:
            raise LayoutError(f"two layouts do not meet: {'; '.join(problems)}")
        return Iso(tuple(_chain(*linked) for linked in _linked(self.parts, then.parts)))

    def __or__(self, beside: Iso) -> Iso:
        """Both, side by side; they must share no key."""
        return product((self, beside))


def product(isos: Iterable[Iso]) -> Iso:
    """Layouts side by side; no two may share a key.

    Raises:
        LayoutError: names a key that two of them claim.
    """
    return Iso(tuple(part for iso in isos for part in iso.parts))


def bijection(
    source: Specs, target: Specs, forward: Move, backward: Move, *, move: str = "own", undo: str = "own, undone"
) -> Iso:
    """A layout of your own, in which every target tensor depends on every source tensor.

    Args:
        source, target: the two sides; they must hold equally many elements.
        forward: maps the source tensors to the target tensors.
        backward: its inverse.
        move, undo: what the two do, in words.

    Raises:
        LayoutError: a side is empty, or they hold different numbers of elements.
    """
    if not source or not target:
        raise LayoutError("both sides of a layout need a tensor")
    counts = [sum(spec.numel for spec in side.values()) for side in (source, target)]
    if counts[0] != counts[1]:
        raise LayoutError(
            f"{', '.join(map(repr, source))} hold {counts[0]} elements, "
            f"but {', '.join(map(repr, target))} hold {counts[1]}; a layout keeps every element"
        )
    return whole(source, target, forward, backward, move, undo, copies=False)


def whole(
    source: Specs, target: Specs, forward: Move, backward: Move, move: str, undo: str, *, copies: bool = True
) -> Iso:
    """One part, every target of which depends on every source; the sides may differ in size, as copies do."""
    part = Part(
        source=source,
        target=target,
        needs=dict.fromkeys(target, tuple(source)),
        forward=forward,
        backward=backward,
        move=move,
        undo=undo,
        copies=copies,
    )
    return Iso((part,))


def views_of(part: Part, tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """What `part` makes of `tensors`, if it is views that cover them exactly once; None if it is not.

    Writing into such views fills `tensors`, so a file can be read straight into the leaves of a tree:
    `views_of(part.inverse, leaves)`. No value is looked at, so `tensors` may be uninitialised.
    """
    if part.copies:  # two views of one element and none of another would be as many as there are elements
        return None
    meta = {name: torch.empty(spec.shape, device="meta") for name, spec in part.source.items()}
    made = part.apply(meta)
    given = {tensor.untyped_storage()._cdata for tensor in meta.values()}
    count = sum(tensor.numel() for tensor in made.values())
    if count != sum(spec.numel for spec in part.source.values()):
        return None
    if any(tensor.untyped_storage()._cdata not in given for tensor in made.values()):
        return None
    return part.apply(tensors)


def describe(iso: Iso) -> str:
    """A layout as a table: what is in the file, what it becomes, and by which moves."""
    rows = [(_shown(part.source), _shown(part.target), part.move) for part in iso.parts]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(f"{source:<{widths[0]}}  {target:<{widths[1]}}  {move}" for source, target, move in rows)


def _shown(specs: Specs) -> str:
    items = [f"{name} {list(spec.shape)}" for name, spec in specs.items()]
    return ", ".join(items if len(items) <= _SHOWN else [*items[:2], f"... {len(items) - 3} more", items[-1]])


def _union(families: Iterable[Specs], side: str) -> Specs:
    merged: dict[str, TensorSpec] = {}
    for family in families:
        for name, spec in family.items():
            if name in merged:
                raise LayoutError(f"the {side} key {name!r} is claimed by two parts of a layout")
            merged[name] = spec
    return merged


def _linked(first: Sequence[Part], second: Sequence[Part]) -> list[tuple[list[Part], list[Part]]]:
    """Groups the parts of two layouts that meet by the tensors that they share in the middle."""
    takers = {name: number for number, part in enumerate(second) for name in part.source}
    givers = {name: number for number, part in enumerate(first) for name in part.target}
    groups: list[tuple[list[Part], list[Part]]] = []
    done: set[int] = set()
    for start in range(len(first)):
        if start in done:
            continue
        ours: dict[int, None] = {start: None}
        theirs: dict[int, None] = {}
        open_parts = [start]
        while open_parts:
            for name in first[open_parts.pop()].target:
                if takers[name] not in theirs:
                    theirs[takers[name]] = None
                    fresh = [g for n in second[takers[name]].source if (g := givers[n]) not in ours]
                    ours |= dict.fromkeys(fresh)
                    open_parts += dict.fromkeys(fresh)
        done |= ours.keys()
        groups.append(([first[i] for i in ours], [second[i] for i in theirs]))
    return groups


def _chain(first: Sequence[Part], second: Sequence[Part]) -> Part:
    """Two rows of parts, one after the other, as one part."""
    near = {name: names for part in first for name, names in part.needs.items()}
    needs = {
        name: tuple(dict.fromkeys(source for middle in names for source in near[middle]))
        for part in second
        for name, names in part.needs.items()
    }
    back = [part.inverse for part in second], [part.inverse for part in first]
    return Part(
        source=_union((part.source for part in first), "source"),
        target=_union((part.target for part in second), "target"),
        needs=needs,
        forward=lambda tensors: _run(second, _run(first, tensors)),
        backward=lambda tensors: _run(back[1], _run(back[0], tensors)),
        move=_in_words([part.move for part in first], [part.move for part in second]),
        undo=_in_words([part.undo for part in second], [part.undo for part in first]),
        copies=any(part.copies for part in (*first, *second)),
    )


def _in_words(first: Sequence[str], second: Sequence[str]) -> str:
    words = [", ".join(dict.fromkeys(side)) for side in (first, second)]
    told = [word for word in words if word != "rename"]
    return " >> ".join(told) or "rename"


def _run(parts: Iterable[Part], tensors: Tensors) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for part in parts:
        made |= part.apply(tensors)
    return made
