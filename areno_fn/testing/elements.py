"""Following single elements through a layout: numbered tensors, random bits, and the tensors that a layout takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

    Attributes:
        specs: the tensors.
        tensors: int64, of the shapes of `specs`.
    """

    specs: Specs
    tensors: Mapping[str, torch.Tensor]
    _ordered: torch.Tensor
    _places: torch.Tensor

    @staticmethod
    def of(specs: Specs) -> Numbering:
        """Numbers the elements of `specs`."""
        numbers = mix(torch.arange(1, 1 + sum(spec.numel for spec in specs.values())))
        ordered, places = numbers.sort()
        return Numbering(specs, _cut(numbers, specs), ordered, places)

    def places(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where in the family each number stands, counted over all its elements; -1 for one that is not its own."""
        if not self._ordered.numel():
            return torch.full_like(numbers, -1)
        found = torch.searchsorted(self._ordered, numbers.contiguous()).clamp(max=self._ordered.numel() - 1)
        return torch.where(self._ordered[found] == numbers, self._places[found], -1)

    def holders(self, numbers: torch.Tensor) -> tuple[str, ...]:
        """The tensors to which these numbers belong, in the order of `specs`."""
        edges = torch.tensor([spec.numel for spec in self.specs.values()]).cumsum(0)
        places = self.places(numbers.flatten())
        held = torch.bucketize(places[places >= 0], edges, right=True).unique().tolist()
        names = list(self.specs)
        return tuple(names[place] for place in held)

    def name(self, number: int) -> str:
        """In words, the element that has this number."""
        if number == PADDING:
            return "a zero of padding"
        place = int(self.places(torch.tensor([number])))
        if place < 0:
            return "a number that stands nowhere"
        for name, spec in self.specs.items():
            if place < spec.numel:
                return f"element {index(place, spec.shape)} of {name!r}"
            place -= spec.numel
        raise AssertionError("a place beyond the last tensor")


def index(place: int, shape: tuple[int, ...]) -> list[int]:
    """The coordinates of an element by its place in row-major order."""
    return [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []


def moved(iso: Iso, numbers: Tensors, *, unread: bool = False) -> dict[str, torch.Tensor]:
    """What a layout makes of int64 numbers, also where it declares other dtypes.

    Where it declares a dtype, the bytes of a number are moved in several passes, as many to a pass as fit.

    Args:
        iso: the layout.
        numbers: its source tensors, int64.
        unread: the layout's own comparisons of values let anything pass.

    Returns:
        Its target tensors, int64.
    """
    widths = [_width(spec) for side in (iso.source, iso.target) for spec in side.values()]
    passes = 8 // min(widths, default=8)
    made: list[dict[str, torch.Tensor]] = []
    for number in range(passes):
        given = {name: _bytes_of(tensor, iso.source[name], number) for name, tensor in numbers.items()}
        made.append(iso(_valueless(given) if unread else given))
    return {name: _joined([plain(one[name]) for one in made], spec) for name, spec in iso.target.items()}


def member(iso: Iso, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors nearest to the given ones that a layout takes: copies are made equal and padding is made zero."""
    there = iso.inverse(_valueless(iso(_valueless(tensors))))
    return {name: plain(there[name]).clone(memory_format=torch.contiguous_format) for name in tensors}


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


def _cut(flat: torch.Tensor, specs: Specs) -> dict[str, torch.Tensor]:
    pieces = flat.split([spec.numel for spec in specs.values()])
    return {name: piece.reshape(spec.shape) for (name, spec), piece in zip(specs.items(), pieces, strict=True)}


def _width(spec: TensorSpec) -> int:
    return 8 if spec.dtype is None else spec.dtype.itemsize


def _bytes_of(numbers: torch.Tensor, spec: TensorSpec, number: int) -> torch.Tensor:
    if spec.dtype is None:
        return numbers
    width = _width(spec)
    place = number % (8 // width) * width
    chosen = numbers.contiguous().reshape(-1, 1).view(torch.uint8)[:, place : place + width]
    return chosen.contiguous().view(spec.dtype).reshape(spec.shape)


def _joined(parts: list[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    if spec.dtype is None:
        return parts[0]
    rows = [raw(part).reshape(spec.numel, -1) for part in parts[: 8 // _width(spec)]]
    return torch.cat(rows, 1).view(torch.int64).reshape(spec.shape)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _listed(names: list[str], word: str) -> str:
    return f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} {word}" if names else ""
