"""Reductions: from numbers per decision to a total and a denominator, and from many of those to metrics.

Nothing here divides except `measure`, once, after micro-batches and ranks have been added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import get_args

import torch

from areno_fn.contracts.actions import Metrics, Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.spec import Aggregation

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def wide(values: torch.Tensor) -> torch.Tensor:
    """The values in float32, or in float64 where they are that already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The values with 0 wherever the weight is 0, whatever stood there (NaN and infinities included).

    Apply it to inputs, before any arithmetic: then neither a value nor a gradient of what is masked can
    reach a result. Multiplying by the weight would not do: 0 times NaN is NaN.

    Args:
        values: floating [M].
        weight: floating or bool [M].

    Returns:
        float32 [M] (float64 for float64 values).
    """
    return torch.where(weight != 0, wide(values), 0.0)


def check_aggregation(how: str, constant: float | None) -> None:
    """Refuses an aggregation that does not exist, or one by a constant length without the length.

    Raises:
        SpecError: says which names exist, or that a constant is missing.
    """
    if how not in AGGREGATIONS:
        raise SpecError(f"aggregation {how!r} does not exist; choose one of {', '.join(AGGREGATIONS)}")
    if how == "constant_length" and not (constant and 0 < constant < math.inf):
        raise SpecError(
            f"aggregation 'constant_length' needs a finite constant > 0, the length that every sequence is divided by, "
            f"not {constant}"
        )


def aggregate(
    values: torch.Tensor,
    weight: torch.Tensor,
    segments: torch.Tensor,
    documents: int,
    how: str,
    constant: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numerator and the denominator of a mean over decisions. The only reduction of every objective.

    With w the weights, W a document's sum of them, and "live" a document that has a weight other than 0:

    | how | total | denominator |
    | --- | --- | --- |
    | token_mean | sum w v | sum w |
    | seq_mean_token_sum | sum w v | live documents |
    | seq_mean_token_mean | sum (w / W) v | live documents |
    | constant_length | sum (w / constant) v | live documents |

    A value under weight 0 never enters, and an empty mask gives (0, 0) with zero gradients. A document must
    not be divided over micro-batches when documents are what is counted.

    Args:
        values: floating [M].
        weight: floating or bool [M], at least 0; carries no gradient.
        segments: int64 [M], the document of each value, in [0, documents), in any order.
        documents: number of documents.
        how: one of `AGGREGATIONS`.
        constant: the length that "constant_length" divides by.

    Returns:
        float32 [] each (float64 for float64 values). The total carries the gradient.

    Raises:
        RecordError: the three are not of one length.
        SpecError: there is no such aggregation, or it lacks its constant.
    """
    check_aggregation(how, constant)
    if not values.shape == weight.shape == segments.shape:
        raise RecordError(
            f"aggregate takes values, weight and segments [M], received {list(values.shape)}, {list(weight.shape)} and "
            f"{list(segments.shape)}; give one of each a decision"
        )
    values, weight = masked(values, weight), weight.detach().to(torch.promote_types(values.dtype, torch.float32))
    if how == "token_mean":
        return (values * weight).sum(), weight.sum()
    # weights are summed in float64, so that the order in which a device adds them cannot show
    sums = torch.zeros(documents, dtype=torch.float64, device=weight.device).index_add(0, segments, weight.double())
    if how == "seq_mean_token_mean":
        weight = weight / torch.where(weight != 0, sums[segments].to(weight.dtype), 1.0)
    elif constant and how == "constant_length":
        weight = weight / constant
    return (values * weight).sum(), (sums != 0).sum().to(weight.dtype)


def mean_of(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A statistic for `Sums.stats` that will be read as the weighted mean of the values: (sum w v, sum w), [2]."""
    values, weight = masked(values.detach(), weight), wide(weight)
    return torch.stack([(values * weight).sum(), weight.sum()])


def spread_of(values: torch.Tensor, weight: torch.Tensor, *, around: float = 0.0) -> torch.Tensor:
    """A statistic for `Sums.stats` that will be read as the population standard deviation of the values, [3].

    It holds (sum w d^2, sum w d, sum w) with d = v - around. Choose `around` near the mean: the variance is
    a difference of the two moments and keeps its digits only when they are small.
    """
    deviation, weight = masked(values.detach() - around, weight), wide(weight)
    return torch.stack([(deviation * deviation * weight).sum(), (deviation * weight).sum(), weight.sum()])


def count_of(weight: torch.Tensor) -> torch.Tensor:
    """A statistic for `Sums.stats` that will be read as the number of decisions that count, [1]."""
    return (weight != 0).sum().to(torch.float32).reshape(1)


def peak_of(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The largest value that counts, for `Sums.peaks`; minus infinity, the identity of the maximum, for none."""
    live = torch.where(weight != 0, wide(values.detach()), -torch.inf)
    return live.amax() if live.numel() else live.new_full((), -torch.inf)


def add_sums(first: Sums, second: Sums) -> Sums:
    """The sums of two disjoint sets of decisions taken together.

    Raises:
        RecordError: the two name different statistics.
    """
    _same_names(first.stats, second.stats, "stats")
    _same_names(first.peaks, second.peaks, "peaks")
    return Sums(
        total=first.total + second.total,
        weight=first.weight + second.weight,
        stats={name: value + second.stats[name] for name, value in first.stats.items()},
        peaks={name: torch.maximum(value, second.peaks[name]) for name, value in first.peaks.items()},
    )


def reduce_sums(parts: Iterable[Sums]) -> Sums:
    """The sums of all parts, at least one, added in their order."""
    first, *rest = parts
    for part in rest:
        first = add_sums(first, part)
    return first


def divide(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The quotient total / weight, and exactly 0 where the weight is 0."""
    return torch.where(weight == 0, 0.0, total / torch.where(weight == 0, 1.0, weight))


def measure(sums: Sums) -> dict[str, torch.Tensor]:
    """What sums stand for: the loss, and every statistic by its name, each a scalar tensor. The one division.

    A statistic of one number is a count, of two a mean, of three a standard deviation. What was measured on
    nothing at all is 0.
    """
    values = {"loss": divide(sums.total, sums.weight)}
    for name, moments in sums.stats.items():
        values[name] = _fresh(name, _read(name, moments), values)
    for name, peak in sums.peaks.items():
        values[name] = _fresh(name, torch.where(peak == -torch.inf, 0.0, peak), values)
    return values


def finish(sums: Sums, extra: Mapping[str, torch.Tensor] | None = None, *, prefix: str = "train") -> Metrics:
    """Metrics of sums that are complete (all micro-batches, all ranks), as `prefix/name` unless a name has a family.

    Args:
        sums: what `reduce_sums` gave.
        extra: more scalar tensors to report, such as an optimizer's.
        prefix: family of the names.
    """
    values = measure(sums)
    for name, value in (extra or {}).items():
        values[name] = _fresh(name, value, values)
    numbers = torch.stack([value.detach().to(sums.total.device, torch.float64) for value in values.values()]).tolist()
    full = [name if "/" in name else f"{prefix}/{name}" for name in values]
    return dict(zip(full, numbers, strict=True))


def _read(name: str, moments: torch.Tensor) -> torch.Tensor:
    if moments.shape == (1,):
        return moments[0]
    if moments.shape == (2,):
        return divide(moments[0], moments[1])
    if moments.shape == (3,):
        mean = divide(moments[1], moments[2])
        return (divide(moments[0], moments[2]) - mean * mean).clamp(min=0).sqrt()
    raise RecordError(
        f"Sums.stats[{name!r}] has shape {tuple(moments.shape)}; "
        f"it must hold 1 number (a count), 2 (a mean) or 3 (a deviation)"
    )


def _fresh(name: str, value: torch.Tensor, taken: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name in taken:
        raise RecordError(f"two metrics are called {name!r}; give the statistic another name")
    return value


def _same_names(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], field: str) -> None:
    different = sorted(first.keys() ^ second.keys())
    if different:
        raise RecordError(
            f"Sums.{field}: {different[0]!r} is in one part and not in the other; "
            f"every micro-batch must report the same names"
        )
