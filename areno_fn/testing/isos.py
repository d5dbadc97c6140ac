"""The law of a single layout: it is a bijection, it moves elements and does nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import Iso, Part, Specs, Tensors, views_of
from areno_fn.testing.elements import (
    PADDING,
    Numbering,
    element,
    index,
    joined,
    member,
    moved,
    random_bits,
    refusals,
    require_same,
)
from areno_fn.testing.sizes import require_some

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
_FLIP = 0x0101010101010101  # changes every byte, so that a comparison of any width sees it


def iso_roundtrip(
    iso: Iso, *, dtypes: Sequence[torch.dtype] = DTYPES, exact_sources: bool = True, key: Key | None = None
) -> None:
    """A layout is a bijection that only moves elements, and its two directions are inverse bit for bit.

    Numbered elements are followed both ways: every element arrives, none is computed, and one that arrives
    nowhere is a copy or padding, on whose value the layout insists. Then any bits, NaNs among them, go there
    and back in several dtypes; what is made has the declared shapes and dtypes, also of meta tensors; the
    declared sources of a leaf are those whose elements it holds; reading into the views of a leaf fills it.

    Args:
        iso: the layout.
        dtypes: of the tensors that go there and back, where the layout declares none.
        exact_sources: a declared source that gives a leaf no element is a fault. A composition may declare
            more than it needs, for example of a rank that holds nothing but padding.
        key: names the bits that are drawn.

    Raises:
        AssertionError: says which law is broken and at which element.
        ValueError: there is no dtype.
    """
    require_some(len(dtypes), "dtypes name none", "give iso_roundtrip one at least")
    _require_inverse_declared(iso)
    for way, there in (("forward", iso), ("backward", iso.inverse)):
        with refusals(f"the layout, {way}, does not take tensors that are as it declares them"):
            _require_meta(there, way)
            _require_moves(there, way, exact_sources)
    key = key or Key.of(0)
    drawn = [random_bits(iso.source, key.fold(number), dtype) for number, dtype in enumerate(dtypes)]
    for dtype, bits in zip(dtypes, member(iso, *drawn), strict=True):
        with refusals(f"{str(dtype).removeprefix('torch.')} tensors that are as the layout makes them are refused"):
            _require_roundtrip(iso, bits)


def _require_inverse_declared(iso: Iso) -> None:
    back, again = iso.inverse, iso.inverse.inverse
    for what, one, other in (
        ("the source of the inverse", back.source, iso.target),
        ("the target of the inverse", back.target, iso.source),
        ("the source of the inverse of the inverse", again.source, iso.source),
        ("the target of the inverse of the inverse", again.target, iso.target),
    ):
        if dict(one) != dict(other):
            raise AssertionError(f"{what} is {_shown(one)}, it should be {_shown(other)}")


def _require_meta(iso: Iso, way: str) -> None:
    given = {
        name: torch.empty(s.shape, dtype=s.dtype or torch.float32, device="meta") for name, s in iso.source.items()
    }
    made = iso(given)
    if list(made) != list(iso.target):
        raise AssertionError(f"{way}, the layout makes {list(made)}, declared are {list(iso.target)}")
    for name, spec in iso.target.items():
        if not made[name].is_meta or not spec.admits(made[name]):
            shape = list(made[name].shape)
            raise AssertionError(
                f"{way}, of meta tensors {name!r} is made {shape} on {made[name].device}, declared {spec}"
            )


def _require_moves(iso: Iso, way: str, exact_sources: bool) -> None:
    """Every element arrives, or is a copy or padding that the layout compares; nothing else is made."""
    numbering = Numbering.of(iso.source)
    made = moved(iso, numbering.tensors, unread=True)
    numbers = joined(made, iso.target)
    places = numbering.places(numbers)
    strange = ((places < 0) & (numbers != PADDING)).nonzero()
    if strange.numel():
        raise AssertionError(
            f"{way}, {element(iso.target, int(strange[0]))} is a number that none of the tensors given holds; "
            "a layout moves elements and computes nothing"
        )
    arrived = torch.zeros(len(numbering.flat), dtype=torch.bool)
    arrived[places[places >= 0]] = True
    back = moved(iso.inverse, made, unread=True)
    returned = joined(back, iso.source)
    wrong = (arrived & (returned != numbering.flat)).nonzero()
    if wrong.numel():
        other = numbering.name(int(returned[wrong[0]]))
        raise AssertionError(f"{way} and back, {other} stands where {element(iso.source, int(wrong[0]))} was")
    _require_copies(iso, way, arrived, back)
    _require_sources(iso, way, made, back, numbering, exact_sources)


def _require_copies(iso: Iso, way: str, arrived: torch.Tensor, back: Tensors) -> None:
    """The first and the last element of each tensor that arrive nowhere: any other value must be refused."""
    parts = {name: part for part in iso.parts for name in part.source}
    pieces = arrived.split([spec.numel for spec in iso.source.values()])
    for (name, spec), there in zip(iso.source.items(), pieces, strict=True):
        lost = (~there).nonzero().flatten()
        for place in {int(lost[0]), int(lost[-1])} if lost.numel() else ():
            if not _is_compared(Iso((parts[name],)), name, place, back):
                raise AssertionError(
                    f"{way}, element {index(place, spec.shape)} of {name!r} arrives nowhere, whatever its value: it is lost"
                )


def _is_compared(iso: Iso, name: str, place: int, back: Tensors) -> bool:
    changed = back[name].flatten().clone()
    changed[place] ^= _FLIP
    given = {other: back[other] for other in iso.source} | {name: changed.reshape(back[name].shape)}
    try:
        moved(iso, given)
    except LayoutError:
        return True
    return False


def _require_sources(
    iso: Iso, way: str, made: Tensors, back: Tensors, numbering: Numbering, exact_sources: bool
) -> None:
    alike: dict[str, set[str]] = {}
    for name, holders in numbering.holders(back, iso.source).items():
        for holder in holders:
            alike.setdefault(holder, set()).add(name)
    for target, holders in numbering.holders(made, iso.target).items():
        declared = iso.sources_of(target)
        hidden = [name for name in iso.source if name in holders and name not in declared]
        if hidden:
            raise AssertionError(
                f"{way}, {target!r} holds elements of {hidden[0]!r}, but declares to be made of {', '.join(declared)}"
            )
        copies = {name for holder in holders for name in alike.get(holder, ())}
        idle = [name for name in declared if name not in holders | copies and iso.source[name].numel]
        if exact_sources and idle and iso.target[target].numel:
            raise AssertionError(
                f"{way}, {target!r} declares to be made of {idle[0]!r}, but holds none of its elements"
            )


def _require_roundtrip(iso: Iso, given: dict[str, torch.Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in given.items()}
    there = {name: tensor.clone() for name, tensor in iso(given).items()}
    require_same(given, before, "the layout writes to the tensors that it is given")
    back = {name: tensor.clone() for name, tensor in iso.inverse(there).items()}
    require_same(back, before, "bits that went there and back")
    require_same(iso(back), there, "bits that went there, back and there again")
    require_same(iso.inverse.inverse(before), there, "the inverse of the inverse")
    for part in iso.parts:
        _require_views(part, before, there)


def _require_views(part: Part, given: Tensors, there: Tensors) -> None:
    leaves = {name: torch.zeros_like(there[name]) for name in part.target}
    views = views_of(part.inverse, leaves)
    if views is None:
        return
    for name, view in views.items():
        view.copy_(given[name])
    require_same(leaves, {name: there[name] for name in leaves}, "leaves that were filled through views")


def _shown(specs: Specs) -> str:
    return ", ".join(f"{name!r} {spec}" for name, spec in specs.items()) or "nothing"
