"""Laws of what a batch is: neither its split into micro-batches nor the order of its rows changes an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.key import Key
from areno_fn.random import permutation
from areno_fn.steps.compose import accumulate
from areno_fn.testing import rows as batches
from areno_fn.testing.rows import Take
from areno_fn.testing.sizes import deviation, floating, require_finite, require_some, summed, widened

_MORAL = "an objective returns Sums of a numerator and a denominator and never divides"


def exact_under_split(
    objective: Callable[[Any, Any], Sums],
    params: Any,
    whole: Any,
    *splits: Sequence[Any],
    tolerance: float = 1e-5,
) -> None:
    """The sums of a batch, and their gradient, are those of its parts added up, however it is split.

    Then the quotient that an update follows cannot depend on micro-batches or ranks. An objective that
    returns a mean in place of a sum fails. For the batches of the library `accumulation_invariant` makes the parts.
    Parameters in less than float32 are taken to float32 first, as in all laws of this kind: in bfloat16 the gradient of
    every part is rounded by itself, and no tolerance could tell that from a mistake.

    Args:
        objective: `(params, batch) -> Sums`.
        params: a tree of tensors.
        whole: the batch in one piece.
        splits: each a sequence of batches that together hold what `whole` holds.
        tolerance: largest deviation, relative to the largest element of what is compared.

    Raises:
        AssertionError: names what differs and in which split, or what is not finite.
        ValueError: there is no split, or nothing in the batch counts.
    """
    others = sum(len(parts) != 1 or parts[0] is not whole for parts in splits)
    require_some(others, "no split was given but the whole itself", "give exact_under_split the parts of a batch")
    variants = [(f"split {number} into {len(parts)} parts", parts) for number, parts in enumerate(splits)]
    _compare(objective, params, whole, variants, tolerance, _MORAL)


def accumulation_invariant(
    objective: Callable[[Any, Any], Sums],
    params: Any,
    batch: Any,
    splits: Sequence[int] = (1, 2, 3, 7),
    *,
    tolerance: float = 1e-6,
    take: Take = batches.take,
    rows: int | None = None,
) -> float:
    """The gradient, the loss and every statistic are the same in one micro-batch as in several.

    What is compared is what training computes: `accumulate` over the parts, with parameters in float32 at least.

        laws.accumulation_invariant(pipeline(score(policy, Sampling()), my_loss), params, packed)

    Args:
        objective: `(params, batch) -> Sums`.
        params: a tree of tensors.
        batch: of tokens or latents, as `pack`, `experience`, `noised`, `denoising` and others make them, of at least as many
            rows as the largest split.
        splits: into how many micro-batches it is cut; one of them is above 1.
        tolerance: largest deviation, relative to the largest element of what is compared.
        take: `(batch, rows) -> batch`, for a batch of another type.
        rows: how many rows such a batch has.

    Returns:
        The largest deviation of the gradient that was found, relative in the same way.

    Raises:
        AssertionError: names what differs and in which split, or what is not finite.
        ValueError: there are fewer rows than micro-batches, no split above 1, or nothing in the batch counts.
    """
    require_some(sum(n > 1 for n in splits), f"splits={tuple(splits)} cuts nothing", "give it a number above 1")
    order = range(batches.count(batch) if rows is None else rows)
    cut = [(f"a split into {n} micro-batches", batches.parts(batch, order, n, take)) for n in splits]
    return _compare(objective, params, batch, cut, tolerance, _MORAL)


def permutation_invariant(
    objective: Callable[[Any, Any], Sums],
    params: Any,
    batch: Any,
    *,
    orders: int = 3,
    tolerance: float = 1e-6,
    take: Take = batches.take,
    rows: int | None = None,
) -> float:
    """The gradient, the loss and every statistic do not depend on the order of the rows or on how they are packed.

    The rows are put into other orders; the first is packed as one batch, the second as two, and so on.

        laws.permutation_invariant(pipeline(act(policy, sampling), my_loss), params, experience)

    Args:
        objective: `(params, batch) -> Sums`.
        params: a tree of tensors.
        batch: of tokens or latents, as `pack`, `experience`, `noised`, `denoising` and others make them, of at least as many
            rows as there are orders.
        orders: how many orders are tried.
        tolerance: largest deviation, relative to the largest element of what is compared.
        take: `(batch, rows) -> batch`, for a batch of another type.
        rows: how many rows such a batch has.

    Returns:
        The largest deviation of the gradient that was found, relative in the same way.

    Raises:
        AssertionError: names what differs and in which order, or what is not finite.
        ValueError: there are fewer rows than orders, a single one, no order, or nothing in the batch counts.
    """
    require_some(orders, f"orders={orders} tries none", "give it 1 at least")
    number = batches.count(batch) if rows is None else rows
    if number < 2:
        raise ValueError(f"a batch of {number} rows has no other order; give it at least 2")
    mixed = []
    for k in range(orders):
        order = permutation(Key.of(k), number).tolist()
        if order == sorted(order):
            order.reverse()
        mixed.append((f"the order {order} in {k + 1} parts", batches.parts(batch, order, k + 1, take)))
    moral = "a row is known by what it holds, never by its place"
    return _compare(objective, params, batch, mixed, tolerance, moral)


def _compare(
    objective: Callable[[Any, Any], Sums],
    params: Any,
    whole: Any,
    variants: Sequence[tuple[str, Sequence[Any]]],
    tolerance: float,
    moral: str,
) -> float:
    """The largest deviation of a gradient over variants of one batch, all within the tolerance."""
    params = widened(params)
    require_some(len(floating(params)), "params hold no floating-point tensor", "give it what is trained")
    expected = _measured(objective, params, [whole])
    require_finite(expected)
    weight = float(expected["weight"][0])
    require_some(weight != 0, "the weight of the whole batch is 0", "give it a batch in which something counts")
    worst = 0.0
    for what, parts in variants:
        received = _measured(objective, params, parts)
        if received.keys() != expected.keys():
            changed = sorted(received.keys() ^ expected.keys())
            raise AssertionError(
                f"{what} reports other numbers: {', '.join(changed)}; every part reports the same names"
            )
        for name, value in expected.items():
            # a total of terms that cancel is as exact as its terms, of which the weight says how many there are
            scale = expected["weight"] if name == "total" else []
            error = deviation(received[name], value, scale)
            if not error <= tolerance:
                raise AssertionError(f"{what} changes {name} by {error:.3g} of its size; {moral}")
            worst = max(worst, error) if name == "the gradient" else worst
    return worst


def _measured(
    objective: Callable[[Any, Any], Sums], params: Any, parts: Sequence[Any]
) -> dict[str, list[torch.Tensor]]:
    """What training makes of micro-batches: the sums, the statistics, the maxima and the gradient."""

    def annotated(params: Any, batch: Any) -> Sums:
        return summed(objective(params, batch))

    gradient, sums = accumulate(annotated)(params, parts)
    return {
        "total": [sums.total],
        "weight": [sums.weight],
        "the gradient": floating(gradient),
        **{f"stats[{name!r}]": [value] for name, value in sums.stats.items()},
        **{f"peaks[{name!r}]": [value] for name, value in sums.peaks.items()},
    }
