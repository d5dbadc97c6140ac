"""The orthogonal factor of a matrix by Newton-Schulz iterations, for fused leaves block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areno_fn.contracts.placement import Fused, Placement
from areno_fn.kernels.symmetric_product import symmetric_product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Muon: steepest at zero, and singular values of 1 land anywhere from about 0.7 to 1.2."""


def orthogonal(
    matrix: torch.Tensor,
    iterations: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Brings the singular values of a matrix near 1 and keeps its singular vectors.

        X <- G / max(|G|, eps),    X <- a X + (b A + c A A) X  with  A = X X^T

    on the side on which A is the smaller. `torch.optim.Muon` does the same operations in the same order.

    Args:
        matrix: [..., E, D]; every matrix of a stack is taken by itself.
        coefficients: (a, b, c); (15/8, -10/8, 3/8) converges to singular values of exactly 1.
        eps: least norm that is divided by; a matrix of zeros stays one.
        dtype: of the computation.

    Returns:
        The same shape, in `dtype`.
    """
    if matrix.ndim > 2 and not matrix.is_cuda:  # a product of a stack adds up in another order than one of a matrix
        stack = [orthogonal(part, iterations, coefficients, eps, dtype) for part in matrix.flatten(0, -3)]
        return torch.stack(stack).reshape(matrix.shape)
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype).mT if tall else matrix.to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(iterations):
        gram = symmetric_product(x)
        odd = symmetric_product(gram, gram, alpha=c, beta=b)
        x = torch.addmm(x, odd, x, beta=a) if x.ndim == 2 else torch.baddbmm(x, odd, x, beta=a)
    return x.mT if tall else x


def orthogonal_each(
    matrices: Sequence[torch.Tensor],
    iterations: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """`orthogonal` of every matrix; on a GPU those of one shape together, because one alone does not keep it busy."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(matrices)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.device) if matrix.is_cuda and matrix.ndim == 2 else (i,), []).append(i)
    for places in alike.values():
        if len(places) == 1:
            found[places[0]] = orthogonal(matrices[places[0]], iterations, coefficients, eps, dtype)
            continue
        stack = torch.stack([matrices[i].to(dtype) for i in places])
        for i, made in zip(places, orthogonal(stack, iterations, coefficients, eps, dtype).unbind(0), strict=True):
            found[i] = made
    return found


def blocks(leaf: torch.Tensor, placement: Placement | None) -> list[torch.Tensor]:
    """The matrices that a leaf consists of, as views: those of a fused leaf, or itself.

    Args:
        leaf: [..., E, D].
        placement: how ranks share it, which says what was fused and along which dimension.
    """
    if not isinstance(placement, Fused):
        return [leaf]
    return list(torch.split(leaf, [block.size for block in placement.blocks], placement.dim))


def joined(parts: list[torch.Tensor], placement: Placement | None) -> torch.Tensor:
    """The inverse of `blocks`."""
    return torch.cat(parts, placement.dim) if isinstance(placement, Fused) else parts[0]


Placements = Mapping[str, Placement]
"""By path, how ranks share a leaf; a leaf that is not named is one matrix."""
