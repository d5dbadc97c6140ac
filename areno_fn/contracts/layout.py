"""Layouts: how the tensors of a file become the leaves of a parameter tree, and back.

An `Iso` is a total bijection between two declared families of tensors. It is built from small ones,
`a >> b` (then) and `a | b` (beside), and its inverse is derived, so that load and save are the two
directions of one value. A layout moves elements and never computes: no cast, no `1 + w`.

Whatever can be wrong is refused when the layout is built or when it meets its tensors, by a `LayoutError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch

from areno_fn.contracts.errors import LayoutError


def _shape(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


@attrs.frozen
class TensorSpec:
    """What a tensor must be.

    Attributes:
        shape: its sizes.
        dtype: its dtype; None leaves it open.
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype | None = None

    def __attrs_post_init__(self) -> None:
        for size in self.shape:
            if type(size) is not int or size < 0:
                raise LayoutError(f"a shape holds integers of at least 0, received {self.shape}")

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def admits(self, tensor: torch.Tensor | TensorSpec) -> bool:
        """True when a tensor, or one that meets another specification, is what this one asks for."""
        return tuple(tensor.shape) == self.shape and self.dtype in (None, tensor.dtype)

    def __str__(self) -> str:
        name = "" if self.dtype is None else f"{str(self.dtype).removeprefix('torch.')} "
        return f"{name}{list(self.shape)}"


Tensors = Mapping[str, torch.Tensor]
Specs = Mapping[str, TensorSpec]
Move = Callable[[Tensors], dict[str, torch.Tensor]]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The specification that exactly this tensor's shape and dtype meet."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


@attrs.frozen
class ParamLayout:
    """The leaves that a parameter tree must have, by dotted path."""

    leaves: Specs

    def differences(self, given: Tensors | Specs) -> list[str]:
        """Everything in which `given` is not what is declared, a phrase each; empty when it is."""
        missing = [f"{name!r} is missing" for name in self.leaves if name not in given]
        unknown = [f"{name!r} is not declared" for name in given if name not in self.leaves]
        wrong = [
            f"{name!r} is {value if isinstance(value, TensorSpec) else spec_of(value)}, declared {self.leaves[name]}"
            for name, value in given.items()
            if name in self.leaves and not self.leaves[name].admits(value)
        ]
        return missing + unknown + wrong

    def check(self, given: Tensors | Specs, what: str = "the tensors given") -> None:
        """Refuses tensors that are not the declared ones.

        Raises:
            LayoutError: lists every missing, undeclared or wrong tensor.
        """
        found = self.differences(given)
        if found:
            raise LayoutError(f"{what} do not fit the layout: {'; '.join(found)}")


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """An indivisible piece of a layout: these source tensors hold exactly the elements of these target tensors.

    Attributes:
        source, target: what goes in and what comes out.
        needs: for each target key, the source keys whose elements it holds.
        forward, backward: move the elements; results may be views of the arguments.
        forward_covers, backward_covers: the results are views that together cover the arguments exactly
            once, so that writing into all of them fills the arguments.
    """

    source: Specs
    target: Specs
    needs: Mapping[str, tuple[str, ...]]
    forward: Move
    backward: Move
    forward_covers: bool = False
    backward_covers: bool = False

    @property
    def inverse(self) -> Part:
        """The same piece, read the other way."""
        return Part(
            source=self.target,
            target=self.source,
            needs={name: tuple(t for t, names in self.needs.items() if name in names) for name in self.source},
            forward=self.backward,
            backward=self.forward,
            forward_covers=self.backward_covers,
            backward_covers=self.forward_covers,
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
    """A bijection between two declared families of tensors, as independent parts. Build one with the functions below.

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


# ------------------------------------------------------------------------------------------------- building


def bijection(
    source: Specs,
    target: Specs,
    forward: Move,
    backward: Move,
    *,
    forward_covers: bool = False,
    backward_covers: bool = False,
) -> Iso:
    """A layout of your own, in which every target tensor depends on every source tensor.

    Args:
        source, target: the two sides; they must hold equally many elements.
        forward: maps the source tensors to the target tensors.
        backward: its inverse.
        forward_covers, backward_covers: as in `Part`.

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
    return Iso((_part(source, target, forward, backward, forward_covers, backward_covers),))


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
        forward_covers=True,
        backward_covers=True,
    )


def concat(parts: Specs, target: str, dim: int = 0) -> Iso:
    """Tensors laid one after the other along a dimension, in the order of `parts`; sizes along it may differ.

    Raises:
        LayoutError: no parts, no such dimension, or parts that differ in another size or in dtype.
    """
    if not parts:
        raise LayoutError(f"concat into {target!r} needs at least one part")
    (first, whole), *others = parts.items()
    axis = _axis(dim, len(whole.shape), f"concat into {target!r}")
    for name, spec in others:
        if _without(spec.shape, axis) != _without(whole.shape, axis) or spec.dtype != whole.dtype:
            raise LayoutError(
                f"concat into {target!r} along dimension {axis}: {name!r} is {spec}, "
                f"which does not continue {first!r}, which is {whole}"
            )
    sizes = [spec.shape[axis] for spec in parts.values()]
    shape = (*whole.shape[:axis], sum(sizes), *whole.shape[axis + 1 :])
    return bijection(
        dict(parts),
        {target: TensorSpec(shape, whole.dtype)},
        lambda tensors: {target: torch.cat([tensors[name] for name in parts], axis)},
        lambda tensors: dict(zip(parts, torch.split(tensors[target], sizes, axis), strict=True)),
        backward_covers=True,
    )


def stack(names: Sequence[str], target: str, spec: TensorSpec, dim: int = 0) -> Iso:
    """Tensors of one shape along a new dimension, in the order of `names`.

    Raises:
        LayoutError: no names, a name twice, or no such dimension.
    """
    if not names:
        raise LayoutError(f"stack into {target!r} needs at least one name")
    _distinct(names, f"stack into {target!r}")
    axis = _axis(dim, len(spec.shape) + 1, f"stack into {target!r}")
    shape = (*spec.shape[:axis], len(names), *spec.shape[axis:])
    return bijection(
        dict.fromkeys(names, spec),
        {target: TensorSpec(shape, spec.dtype)},
        lambda tensors: {target: torch.stack([tensors[name] for name in names], axis)},
        lambda tensors: dict(zip(names, tensors[target].unbind(axis), strict=True)),
        backward_covers=True,
    )


def tie(target: str, names: Sequence[str], spec: TensorSpec) -> Iso:
    """One leaf that stands in the file under one or several names.

    Tensors that are given under several names must be equal bit for bit; the inverse gives the leaf under
    every name.

    Raises:
        LayoutError: no names or a name twice; when applied, names both tensors that differ.
    """
    if not names:
        raise LayoutError(f"tie of {target!r} needs at least one name")
    _distinct(names, f"tie of {target!r}")
    if len(names) == 1:
        return rename(names[0], target, spec)

    def forward(tensors: Tensors) -> dict[str, torch.Tensor]:
        first = tensors[names[0]]
        for name in names[1:]:
            _require_equal_bits(target, names[0], first, name, tensors[name])
        return {target: first}

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        return dict.fromkeys(names, tensors[target])

    return Iso((_part(dict.fromkeys(names, spec), {target: spec}, forward, backward, False, False),))


def product(isos: Iterable[Iso]) -> Iso:
    """Layouts side by side; no two may share a key.

    Raises:
        LayoutError: names a key that two of them claim.
    """
    return Iso(tuple(part for iso in isos for part in iso.parts))


# ------------------------------------------------------------------------------------------------ machinery


def _part(
    source: Specs, target: Specs, forward: Move, backward: Move, forward_covers: bool, backward_covers: bool
) -> Part:
    return Part(
        source=source,
        target=target,
        needs=dict.fromkeys(target, tuple(source)),
        forward=forward,
        backward=backward,
        forward_covers=forward_covers,
        backward_covers=backward_covers,
    )


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
    groups, done = [], set()
    for start in range(len(first)):
        if start in done:
            continue
        ours, theirs, open_parts = [start], [], [start]
        done.add(start)
        while open_parts:
            for name in first[open_parts.pop()].target:
                if takers[name] not in theirs:
                    theirs.append(takers[name])
                    fresh = dict.fromkeys(givers[n] for n in second[takers[name]].source if givers[n] not in done)
                    ours += fresh
                    open_parts += fresh
                    done |= fresh.keys()
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
        forward_covers=all(part.forward_covers for part in (*first, *second)),
        backward_covers=all(part.backward_covers for part in (*first, *second)),
    )


def _run(parts: Iterable[Part], tensors: Tensors) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for part in parts:
        made |= part.apply(tensors)
    return made


def _axis(dim: int, dims: int, where: str) -> int:
    if not -dims <= dim < dims:
        raise LayoutError(f"{where}: there is no dimension {dim} among {dims}")
    return dim % dims


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _distinct(names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"{where} names {name!r} twice")


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
