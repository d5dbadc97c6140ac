"""`symmetric_product`: alpha a a^T + beta c for a symmetric c, of which one half is computed."""

from __future__ import annotations

import torch

from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.symmetric_product import reference

__all__ = ["symmetric_product"]


def symmetric_product(
    a: torch.Tensor, c: torch.Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """The product of a matrix and its own transpose, `alpha a a^T + beta c`, for each matrix of a stack.

    Sums are in float32 (float64 for float64) and rounded once. What `c` holds above its diagonal is not read on the GPU, where
    the tiles below the diagonal are computed and written twice, so that the result is symmetric to the bit. It is what the
    Newton-Schulz iterations of Muon are made of: with A = x x^T, `b A + c A A` is symmetric as well. There is no gradient.

    Args:
        a: [..., E, D], floating.
        c: [..., E, E] of the same dtype, symmetric; or None for 0.
        alpha: factor of the product.
        beta: factor of `c`.

    Returns:
        [..., E, E] in the dtype of `a`, contiguous.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no kernel for the device.
    """
    fits = a.ndim >= 2 and a.is_floating_point()
    wanted = "a must be floating [..., E, D], and c None or [..., E, E] of the same dtype"
    shape = (*a.shape[:-1], a.shape[-2]) if fits else ()
    fits = fits and (c is None or (c.shape == shape and c.dtype == a.dtype))
    require(fits, "symmetric_product", wanted, a, *(() if c is None else (c,)))
    if a.is_meta:  # a shape is all that is asked for
        return a.new_empty(shape)
    out: torch.Tensor = _product(a, c, alpha, beta)
    return out


_product = implementation(
    "symmetric_product",
    "product",
    "(Tensor a, Tensor? c, float alpha, float beta) -> Tensor",
    reference.product,
    lambda a, c, alpha, beta: a.new_empty(*a.shape[:-1], a.shape[-2]),
)
