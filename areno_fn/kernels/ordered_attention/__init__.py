"""`ordered_attention`: attention over packed documents and over pages that gives a query the same bits in both, on the GPU too."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels import attention
from areno_fn.kernels.attention import PackedLayout, fused
from areno_fn.kernels.backend import backend, require
from areno_fn.kernels.paged_attention import paged_attention

__all__ = ["forward", "over_pages", "packed"]


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    """`packed_attention`: every token attends to itself and to the earlier tokens of its own document.

    Scores, exponentials and values are summed over blocks of keys that begin at the document's first one, in one order. A
    token's result is a function of its query and of the keys and values up to it, to the bit, whatever lies beside them.
    Differentiable in q, k and v, once; the backward is that of `fused`, whose bits depend on the packing.

    Args:
        q: [N, H, head_dim]; on the GPU bfloat16 or float16, with heads of at most 128 channels in eights.
        k: [N, K, head_dim], with H a multiple of K.
        v: like `k`.
        layout: where the documents are.
        scale: factor of the scores, above 0.

    Returns:
        [N, H, head_dim] in the dtype of `q`, contiguous.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no kernel for the device.

    Source: Dao, "FlashAttention-2", 2023, algorithm 1, with blocks of keys of one size.
    """
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2] and scale > 0
    fits = fits and q.shape[0] == layout.tokens and attention.shared_alike(q, k, v, k.shape[1])
    wanted = (
        f"q must be [N, H, head_dim] and k and v [N, K, head_dim] of one dtype with N = {layout.tokens} and H a multiple "
        "of K, and the scale above 0"
    )
    require(fits, "ordered_attention", wanted, q, k, v)
    if backend("ordered_attention", q, k, v) == "reference":
        return attention.packed_attention(q, k, v, layout, scale)
    out: torch.Tensor = _packed(q, k, v, layout, scale)[0]
    return out


def over_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    longest: int | None = None,
) -> torch.Tensor:
    """`paged_attention` without a window: one query a row attends to all of the row's places.

    Places are taken in the blocks and the order of `packed`, by one program a row and key head, so a row's bits are those
    of the last token of a packed document with the same queries, keys and values. A few long rows keep few programs busy.

    Args:
        q: [B, H, head_dim]; on the GPU as for `packed`.
        keys: [P, size, K, head_dim], with H a multiple of K.
        values: like `keys`.
        table: int64 [B, W].
        lengths: int64 [B], from 1 to W * size.
        scale: factor of the scores, above 0.
        longest: as for `paged_attention`.

    Returns:
        [B, H, head_dim] in the dtype of `q`, contiguous.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no kernel for the device.
    """
    fits = q.ndim == 3 and keys.ndim == 4 and keys.shape == values.shape and keys.shape[3] == q.shape[2]
    fits = fits and keys.shape[2] > 0 and q.shape[1] % keys.shape[2] == 0 and q.dtype == keys.dtype == values.dtype
    fits = fits and table.ndim == 2 and table.shape[0] == q.shape[0] and lengths.shape == q.shape[:1] and scale > 0
    fits = fits and table.dtype == lengths.dtype == torch.int64
    wanted = (
        "q must be [B, H, head_dim], keys and values [P, size, K, head_dim] of the same dtype with H a multiple of K, "
        "table int64 [B, W], lengths int64 [B], and the scale above 0"
    )
    require(fits, "ordered_attention", wanted, q, keys, values, table, lengths)
    if backend("ordered_attention", q, keys, values, table, lengths) == "reference":
        return paged_attention(q, keys, values, table, lengths, scale, longest=longest)
    out: torch.Tensor = _triton().over_pages(q, keys, values, table, lengths, scale)
    return out


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> tuple[torch.Tensor, ...]:
    """`packed` on the GPU without a derivative, and all that `fused.backward` needs beside its arguments."""
    out, sums = _triton().packed(q, k, v, layout, scale)
    # where the kernels of `fused` keep the state of a dropout that there is none of
    if fused.dense(q, layout):
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    else:
        seed, offset = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in (2, 0))
    return out, sums, seed, offset


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, layout, scale = inputs
    return *fused.backward(cotangents[0], q, k, v, outputs, layout, scale), None, None


def _triton() -> Any:
    return importlib.import_module("areno_fn.kernels.ordered_attention.triton")


_packed = custom_vjp(forward, _pull, constant_outputs=(1, 2, 3))
