"""The numbers in one tensor, and in what two differ, in float64; what is known of pieces can be added up."""

from __future__ import annotations

import math

import attrs
import torch

TINY = torch.finfo(torch.float32).tiny
"""Least denominator of a relative difference, 1.2e-38."""

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen(kw_only=True)
class Side:
    """What is in a tensor.

    Attributes:
        norm: square root of the sum of squares of its finite elements.
        nan, inf: how many elements are NaN, and infinite.
        zero: no element is other than zero.
    """

    norm: float = 0.0
    nan: int = 0
    inf: int = 0
    zero: bool = True

    def __add__(self, other: Side) -> Side:
        """Of the elements of both."""
        return Side(
            norm=math.hypot(self.norm, other.norm),
            nan=self.nan + other.nan,
            inf=self.inf + other.inf,
            zero=self.zero and other.zero,
        )


@attrs.frozen(kw_only=True)
class Compared:
    """In what two tensors of one shape differ.

    Attributes:
        a, b: what is in each.
        numel: elements.
        differing: elements whose bits differ; for two dtypes, whose values do.
        norm: square root of the sum of squares of the differences of finite elements.
        largest: largest absolute difference of finite elements.
        odd: elements that are finite in one only, or NaN or infinite in another way.
    """

    a: Side = attrs.field(factory=Side)
    b: Side = attrs.field(factory=Side)
    numel: int = 0
    differing: int = 0
    norm: float = 0.0
    largest: float = 0.0
    odd: int = 0

    @property
    def relative(self) -> float:
        """||a - b|| / max(||a||, 1.2e-38); infinite where an element is odd."""
        return math.inf if self.odd else self.norm / max(self.a.norm, TINY)

    def __add__(self, other: Compared) -> Compared:
        """Of the elements of both."""
        return Compared(
            a=self.a + other.a,
            b=self.b + other.b,
            numel=self.numel + other.numel,
            differing=self.differing + other.differing,
            norm=math.hypot(self.norm, other.norm),
            largest=max(self.largest, other.largest),
            odd=self.odd + other.odd,
        )


def looked_at(x: torch.Tensor) -> Side:
    """What is in a vector that has elements."""
    return _side(x.double())


def compared(a: torch.Tensor, b: torch.Tensor) -> Compared:
    """In what two vectors of one length differ that have elements and are on one device."""
    x = a.double()
    ours = _side(x)
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return Compared(a=ours, b=ours, numel=a.numel())
    y = b.double()
    finite = x.isfinite() & y.isfinite()
    delta = torch.where(finite, x - y, 0.0)
    unequal = (x != y) & ~(x.isnan() & y.isnan())
    return Compared(
        a=ours,
        b=_side(y),
        numel=a.numel(),
        differing=int((_bits(a) != _bits(b)).sum() if a.dtype == b.dtype else unequal.sum()),
        norm=_norm(delta, _largest(delta)),
        largest=_largest(delta),
        odd=int((unequal & ~finite).sum()),
    )


def _side(x: torch.Tensor) -> Side:
    """Of a vector in float64 that has elements."""
    largest = _largest(x)
    if math.isfinite(largest):
        return Side(norm=_norm(x, largest), zero=largest == 0)
    nan, inf = x.isnan(), x.isinf()
    rest = torch.where(nan | inf, 0.0, x)
    return Side(norm=_norm(rest, _largest(rest)), nan=int(nan.sum()), inf=int(inf.sum()), zero=False)


def _largest(x: torch.Tensor) -> float:
    """The largest absolute value; NaN where there is one."""
    low, high = x.aminmax()
    return max(-float(low), float(high))


def _norm(x: torch.Tensor, largest: float) -> float:
    """Without overflow or underflow on the way: numbers of float64 may be of any size."""
    if largest == 0 or math.isinf(largest):
        return largest
    if 1e-100 < largest < 1e100:
        return float(torch.linalg.vector_norm(x))
    return largest * float(torch.linalg.vector_norm(x / largest))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_SAME_WIDTH[x.itemsize])
