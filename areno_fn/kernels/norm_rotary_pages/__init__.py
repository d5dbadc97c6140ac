"""`norm_rotary_pages`: the step between a fused projection and attention over pages, for one token a row, in one pass."""

from __future__ import annotations

import importlib

import torch

from areno_fn.kernels.backend import backend, require
from areno_fn.kernels.norm_rotary import fit_together
from areno_fn.kernels.norm_rotary_pages import reference

__all__ = ["norm_rotary_pages"]


def norm_rotary_pages(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """`norm_rotary`, whose keys go to their places in pages together with the values, as `write_pages` puts them.

    There is no gradient.

    Args:
        qkv: [N, H + 2 K, head_dim], floating, in the order q, k, v.
        q_weight: [head_dim], or None for both.
        k_weight: like `q_weight`.
        cos: [N, head_dim / 2].
        sin: like `cos`.
        heads: H.
        eps: added to the mean square.
        keys: [P, size, K, head_dim] in the dtype of `qkv`; written to.
        values: like `keys`.
        places: int64 [N], distinct but for place 0, which holds any of what is written to it.

    Returns:
        Queries [N, H, head_dim], contiguous.

    Raises:
        KernelError: the shapes or dtypes do not fit, or there is no kernel for the device.
    """
    weights = [w for w in (q_weight, k_weight) if w is not None]
    fits = fit_together(qkv, weights, cos, sin, heads)
    fits = fits and keys.ndim == 4 and keys.shape == values.shape and keys.dtype == values.dtype == qkv.dtype
    fits = fits and keys.shape[2:] == ((qkv.shape[1] - heads) // 2, qkv.shape[2])
    fits = fits and places.dtype == torch.int64 and places.shape == qkv.shape[:1]
    wanted = (
        "qkv must be floating [N, H + 2 K, head_dim], cos and sin [N, head_dim / 2], the weights both [head_dim] or both None, "
        f"keys and values [P, size, K, head_dim] in the dtype of qkv, and places int64 [N], with H = {heads}"
    )
    require(fits, "norm_rotary_pages", wanted, qkv, cos, sin, *weights, keys, values, places)
    given = qkv, q_weight, k_weight, cos, sin, heads, eps, keys, values, places
    if backend("norm_rotary_pages", qkv, cos, sin, *weights, keys, values, places) == "reference":
        return reference.forward(*given)
    q: torch.Tensor = importlib.import_module("areno_fn.kernels.norm_rotary_pages.triton").forward(*given)
    return q
