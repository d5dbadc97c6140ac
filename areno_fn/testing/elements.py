"""Following single elements through a layout: numbered tensors, random bits, and the tensors that a layout takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch

from areno_fn import random
from areno_fn.contracts.errors import ArenoError
from areno_fn.contracts.key import Key, mix
from areno_fn.contracts.layout import Iso, Specs, Tensors, TensorSpec

PADDING = 0
"""The number that stands for an element of padding; no element of a tensor has it."""


class _Unread(torch.Tensor):
    """Real values that claim, as those of a meta tensor, not to be there: a layout moves them and compares none."""

    is_meta = True  # type: ignore[assignment,unused-ignore]


@attrs.frozen(eq=False)
class Numbering:
    """A number for every element of a family of tensors, unlike any result of arithmetic on the others.

    Elements are counted over all tensors, in their order; that count is the place of an element.

    Attributes:
        specs: the tensors.
        flat: the number of every element, by place, int64.
    """

    specs: Specs
    flat: torch.Tensor
    _ordered: torch.Tensor
    _places: torch.Tensor

    @staticmethod
    def of(specs: Specs) -> Numbering:
        """Numbers the elements of `specs`."""
        numbers = mix(torch.arange(1, 1 + sum(spec.numel for spec in specs.values())))
        return Numbering(specs, numbers, *numbers.sort())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The numbers, in the shapes of `specs`."""
        pieces = self.flat.split([spec.numel for spec in self.specs.values()])
        return {name: part.reshape(spec.shape) for (name, spec), part in zip(self.specs.items(), pieces, strict=True)}

    def places(self, numbers: torch.Tensor) -> torch.Tensor:
        """The place of the element that has each of these numbers [n]; -1 for a number that no element has."""
        if not self._ordered.numel():
            return torch.full_like(numbers, -1)
        found = torch.searchsorted(self._ordered, numbers).clamp(max=self._ordered.numel() - 1)
        return torch.where(self._ordered[found] == numbers, self._places[found], -1)

    def holders(self, tensors: Tensors, specs: Specs) -> dict[str, set[str]]:
        """For each of `tensors`, which are numbers in the shapes of `specs`, the tensors whose elements it holds."""
        places = self.places(joined(tensors, specs))
        own, other = _owners(self.specs, places), _owners(specs, torch.arange(len(places)))
        pairs = (other * len(self.specs) + own)[places >= 0].unique().tolist()
        names, held = list(self.specs), list(specs)
        found: dict[str, set[str]] = {name: set() for name in specs}
        for pair in pairs:
            found[held[pair // len(names)]].add(names[pair % len(names)])
        return found

    def name(self, number: int) -> str:
        """In words, the element that has this number."""
        if number == PADDING:
            return "a zero of padding"
        place = int(self.places(torch.tensor([number])))
        return "a number that stands nowhere" if place < 0 else element(self.specs, place)


def joined(tensors: Tensors, specs: Specs) -> torch.Tensor:
    """All elements of the tensors, in the order of `specs`."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(tensors[name].flatten() for name in specs)])


def element(specs: Specs, place: int) -> str:
    """In words, the element of a family of tensors at a place."""
    for name, spec in specs.items():
        if place < spec.numel:
            return f"element {index(place, spec.shape)} of {name!r}"
        place -= spec.numel
    raise IndexError("there are not so many elements")


def index(place: int, shape: tuple[int, ...]) -> list[int]:
    """The coordinates of an element by its place in row-major order."""
    return [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []


def moved(iso: Iso, numbers: Tensors, *, unread: bool = False) -> dict[str, torch.Tensor]:
    """What a layout makes of int64 numbers, also where it declares other dtypes.

    Where it declares a dtype, the bits of a number are moved in several passes, as many to a pass as fit.

    Args:
        iso: the layout.
        numbers: its source tensors, int64.
        unread: the layout's own comparisons of values let anything pass.

    Returns:
        Its target tensors, int64.
    """
    widths = [_width(spec) for side in (iso.source, iso.target) for spec in side.values()]
    made: list[dict[str, torch.Tensor]] = []
    for number in range(64 // min(widths, default=64)):
        given = {name: _bits_of(tensor, iso.source[name], number) for name, tensor in numbers.items()}
        made.append(iso(_valueless(given) if unread else given))
    return {name: _put_together([plain(one[name]) for one in made], spec) for name, spec in iso.target.items()}


def takes(iso: Iso) -> dict[str, torch.Tensor]:
    """The numbers of the source side, where a copy has the number of what it copies and padding has `PADDING`."""
    numbers = Numbering.of(iso.source).tensors
    return moved(iso.inverse, moved(iso, numbers, unread=True), unread=True)


def member(iso: Iso, *families: Tensors) -> list[dict[str, torch.Tensor]]:
    """For each family of source tensors the nearest one that a layout takes: copies made equal, padding made zero.

    Which elements are copies is found with numbers, so a layout that changes values cannot hide that it does.
    """
    places = Numbering.of(iso.source).places(joined(takes(iso), iso.source))
    return [_gathered(tensors, iso.source, places) for tensors in families]


def random_bits(specs: Specs, key: Key, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors of any bit pattern, NaNs and infinities included.

    Args:
        specs: their shapes and dtypes.
        key: names the draw.
        dtype: of those that declare none.
    """
    kinds = {name: spec.dtype or dtype for name, spec in specs.items()}
    lengths = {name: math.ceil(spec.numel * kinds[name].itemsize / 8) for name, spec in specs.items()}
    drawn = random.words(key, torch.arange(sum(lengths.values())))
    made = {}
    for (name, spec), part in zip(specs.items(), drawn.split(list(lengths.values())), strict=True):
        kind = kinds[name]
        raw = part.view(torch.uint8)[: spec.numel * kind.itemsize].clone()
        made[name] = (raw & 1 if kind is torch.bool else raw).view(kind).reshape(spec.shape)
    return made


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of torch's own class."""
    return tensor.as_subclass(torch.Tensor)


def require_same(received: Tensors, expected: Tensors, what: str) -> None:
    """Keys, shapes, dtypes and bytes are the same.

    Raises:
        AssertionError: says, after `what`, what differs first and where.
    """
    absent = [name for name in expected if name not in received]
    extra = [name for name in received if name not in expected]
    if absent or extra:
        raise AssertionError(
            f"{what}: {_listed(absent, 'lost')}{'; ' if absent and extra else ''}{_listed(extra, 'new')}"
        )
    for name, tensor in expected.items():
        other = received[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise AssertionError(f"{what}: {name!r} is {_kind(other)} and was {_kind(tensor)}")
        different = (raw(other) != raw(tensor)).nonzero()
        if different.numel():
            place = index(int(different[0]) // tensor.element_size(), tuple(tensor.shape))
            raise AssertionError(f"{what}: element {place} of {name!r} has other bits, as have {len(different)} bytes")


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """A context in which errors of a part under test, refusals among them, are broken laws."""
    try:
        yield
    except AssertionError:
        raise
    except (ArenoError, RuntimeError, ValueError, TypeError, LookupError) as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def _valueless(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.as_subclass(_Unread) for name, tensor in tensors.items()}


def _owners(specs: Specs, places: torch.Tensor) -> torch.Tensor:
    """Which tensor, by its number, each place is in."""
    edges = torch.tensor([spec.numel for spec in specs.values()], dtype=torch.int64).cumsum(0)
    return torch.bucketize(places, edges, right=True)


def _gathered(tensors: Tensors, specs: Specs, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every element becomes the one that stands at its entry of `places`; zero where that is -1."""
    if torch.equal(places, torch.arange(len(places))):
        return {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in specs}
    rows = torch.zeros(len(places) + 1, 16, dtype=torch.uint8)
    start = 0
    for name, spec in specs.items():
        rows[start : start + spec.numel, : tensors[name].element_size()] = raw(tensors[name]).reshape(spec.numel, -1)
        start += spec.numel
    pieces = rows[places].split([spec.numel for spec in specs.values()])
    return {
        name: piece[:, : tensors[name].element_size()].contiguous().view(tensors[name].dtype).reshape(spec.shape)
        for (name, spec), piece in zip(specs.items(), pieces, strict=True)
    }


def _width(spec: TensorSpec) -> int:
    """How many bits of a number fit into an element."""
    if spec.dtype is torch.bool:
        return 1
    return 64 if spec.dtype is None else min(64, 8 * spec.dtype.itemsize)


def _bits_of(numbers: torch.Tensor, spec: TensorSpec, number: int) -> torch.Tensor:
    """The bits that are moved in a pass, as a tensor of `spec`."""
    if spec.dtype is None:
        return numbers
    width = _width(spec)
    shift = number * width % 64
    if spec.dtype is torch.bool:
        return (numbers >> shift & 1).bool()
    chosen = numbers.contiguous().reshape(-1, 1).view(torch.uint8)[:, shift // 8 : (shift + width) // 8]
    return chosen.contiguous().view(spec.dtype).reshape(spec.shape)


def _put_together(parts: list[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """The numbers whose bits were moved in these passes."""
    if spec.dtype is None:
        return parts[0]
    if spec.dtype is torch.bool:
        shifted = [part.to(torch.int64) << shift for shift, part in enumerate(parts)]
        return torch.stack(shifted).sum(0)
    rows = [raw(part).reshape(spec.numel, -1) for part in parts[: 64 // _width(spec)]]
    return torch.cat(rows, 1).view(torch.int64).reshape(spec.shape)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _listed(names: list[str], word: str) -> str:
    return f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} {word}" if names else ""
