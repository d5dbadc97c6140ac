"""All leaves of a tree times or over one number, each in its own dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Leaves = list[torch.Tensor] | tuple[torch.Tensor, ...]


def fitting(scalar: torch.Tensor, leaves: Leaves) -> torch.Tensor:
    """A scalar tensor in the dtype that the leaves share; a mixture leaves it as it is.

    With another dtype, CUDA would work through the leaves one by one.
    """
    dtypes = {leaf.dtype for leaf in leaves}
    return scalar.to(dtypes.pop()) if len(dtypes) == 1 else scalar


def scaled(leaves: Leaves, factor: torch.Tensor) -> list[torch.Tensor]:
    """Every leaf times the factor, []."""
    return _in_own_dtype(torch._foreach_mul(leaves, fitting(factor, leaves)), leaves)


def divided(leaves: Leaves, divisor: torch.Tensor) -> list[torch.Tensor]:
    """Every leaf over the divisor, []."""
    return _in_own_dtype(torch._foreach_div(leaves, fitting(divisor, leaves)), leaves)


def _in_own_dtype(results: Sequence[torch.Tensor], leaves: Leaves) -> list[torch.Tensor]:
    """A leaf of no dimensions takes the dtype of a wider scalar; this takes it back."""
    return [result.to(leaf.dtype) for result, leaf in zip(results, leaves, strict=True)]
