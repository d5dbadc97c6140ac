"""How far two trees of numbers are apart, in the precision in which that can be said, and refusals to compare nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.actions import Sums

Numbers = Mapping[str, Sequence[torch.Tensor]]
"""Tensors by what messages call them."""

LEAST = 1e-6
"""A size below it counts as this one."""


def is_floating(value: Any) -> bool:
    """Whether a leaf is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def floating(values: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a tree."""
    return [leaf for leaf in tree.leaves(values) if is_floating(leaf)]


def widened(values: Any) -> Any:
    """A tree whose floating-point tensors are in float32 at least.

    The numbers are the same. A law of sums is no law of roundings: in bfloat16 the gradient of every part is rounded by
    itself, to two or three digits, and parts of a right objective add up to the whole no better than that.
    """
    return tree.map(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)) if is_floating(x) else x, values)


def deviation(
    received: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], scale: Sequence[torch.Tensor] = ()
) -> float:
    """The largest difference of any element, in units of the largest element (or of `LEAST`, if that is larger).

    Equal infinities differ by nothing, and NaN from everything.

    Args:
        received, expected: tensors of the same shapes, in their order.
        scale: what may give the largest element too.
    """
    a, b, size = (
        torch.cat([x.detach().double().flatten() for x in leaves])
        for leaves in (received, expected, [*expected, *scale])
    )
    difference = torch.where(a == b, 0.0, (a - b).abs())
    finite = size[size.isfinite()].abs()
    largest = max(float(finite.amax()) if finite.numel() else 0.0, LEAST)
    return float(difference.amax()) / largest if difference.numel() else 0.0


def require_finite(numbers: Numbers) -> None:
    """What is compared with is a number: NaN could not be told from NaN.

    Raises:
        AssertionError: names what is not. Maxima, whose name begins with "peaks", may be infinite.
    """
    for name, tensors in numbers.items():
        for tensor in tensors:
            bad = tensor.isnan() if name.startswith("peaks") else ~tensor.isfinite()
            if bool(bad.any()):
                raise AssertionError(f"{name} is {float(tensor[bad][0])} before anything is changed; it must be finite")


def summed(result: object) -> Sums:
    """What a loss returned.

    Raises:
        AssertionError: it is no `Sums`.
    """
    if not isinstance(result, Sums):
        raise AssertionError(
            f"the loss returned a {type(result).__name__}; it must return Sums(total=total, weight=weight, ...), undivided, "
            f"with total, weight = aggregate(...)"
        )
    return result


def require_some(count: int, what: str, right: str) -> None:
    """A law that would compare nothing is no test.

    Raises:
        ValueError: there is nothing: "<what>, so that nothing would be compared; <right>".
    """
    if count < 1:
        raise ValueError(f"{what}, so that nothing would be compared; {right}")
