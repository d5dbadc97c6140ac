"""`attention`: causal softmax attention over packed documents, and over a cache.

torch's own kernels do the work where they reach, and Triton's where they do not (`fused.py`): scores with a soft cap. On
the GPU in half precision documents stay as they are packed, end to end, and there is never a mask of N x N. Elsewhere they
are laid side by side in a view padded to the longest one for `scaled_dot_product_attention`; for documents of one length
that is a reshape, and otherwise it costs documents x longest places, so pack documents of similar length together.

On the CPU a token's result has the same bits whatever it is packed or decoded with, as far as `places.py` explains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from areno_fn.kernels.attention.fused import forms, fused_attention, takes
from areno_fn.kernels.attention.layout import PackedLayout, equal_documents, packed_layout
from areno_fn.kernels.attention.places import key_places, padded
from areno_fn.kernels.attention.reference import attend, attend_cached
from areno_fn.kernels.backend import require
from areno_fn.kernels.linear import FEW

__all__ = ["PackedLayout", "cached_attention", "equal_documents", "key_places", "packed_attention", "packed_layout"]


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Every token attends to itself and to the earlier tokens of its own document.

    `o_i = sum_j p_ij v_j` with `p_i = softmax_j(s_ij)` over the places j <= i of i's document, the last `window` of
    them where there is one; `s_ij = scale * q_i . k_j`, or `cap * tanh(scale * q_i . k_j / cap)` with a soft cap. Head h
    of q reads head h // (H / K) of k and v. What stands in one document cannot change a bit of another's result.

    A window or a soft cap in float64, on the CPU, of heads wider than 256 or in a traced graph is formed in plain
    torch, with all scores of a document at once.

    In 16 bits the backward is given the result as it was rounded, as that of FlashAttention is. Where weights are peaked, the
    gradients of q and k are small differences, and that rounding can be some percent of their largest element (heads of 256
    whose scores go far beyond a soft cap of 30); use float32 where that matters.

    Args:
        q: [N, H, head_dim], floating.
        k: [N, K, head_dim], with H a multiple of K.
        v: like `k`.
        layout: where the documents are; compute it once per forward pass.
        scale: factor of the scores.
        window: how many places are seen, the token's own included; 0 for all.
        soft_cap: what the absolute value of a score stays below (Gemma 2); 0 for none.

    Returns:
        [N, H, head_dim] in the dtype of `q`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit each other, or the window or the soft cap is negative.

    Source: Vaswani et al., "Attention is all you need", 2017, equation 1; Ainslie et al., "GQA", 2023.
    """
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]
    fits = fits and q.shape[0] == layout.tokens and shared_alike(q, k, v, k.shape[1])
    wanted = (
        f"q must be floating [N, H, head_dim] and k and v [N, K, head_dim] of the same dtype and device with N = {layout.tokens} "
        "and H a multiple of K"
    )
    require(fits, "packed_attention", wanted, q, k, v)
    require(window >= 0 and soft_cap >= 0, "packed_attention", "window and soft_cap must not be negative", q, k, v)
    window = 0 if window >= layout.longest else window
    if takes(q, q.shape[-1]) or ((window or soft_cap) and forms(q)):
        return fused_attention(q, k, v, layout, scale, window, soft_cap)
    if window or soft_cap:
        return attend(q, k, v, layout, scale, window, soft_cap)
    shared = q.shape[1] != k.shape[1]
    places = key_places(layout.longest, q.device)
    q, k, v = (padded(layout.pad(x).transpose(1, 2), places) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
    return layout.unpad(out[:, :, : layout.longest].transpose(1, 2))


def shared_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> bool:
    """Whether queries can share so many key heads evenly, and are of the dtype and on the device of keys and values."""
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    return alike and q.is_floating_point() and heads > 0 and q.shape[1] % heads == 0


def cached_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """One query a row attends to the first `lengths` places of the row's cache.

    Args:
        q: [B, H, head_dim], floating.
        keys: [B, S, K, head_dim], with H a multiple of K; places at or past a row's length are never weighed, but
            must be finite. With S of `key_places` nothing is copied.
        values: like `keys`.
        lengths: int64 [B], from 1 to S.
        scale: factor of the scores.
        soft_cap: what the absolute value of a score stays below; 0 for none.

    Returns:
        [B, H, head_dim] in the dtype of `q`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit each other, or the soft cap is negative.
    """
    fits = q.ndim == 3 and keys.ndim == 4 and keys.shape == values.shape and keys.shape[::3] == q.shape[::2]
    fits = fits and lengths.shape == q.shape[:1] and shared_alike(q, keys, values, keys.shape[2]) and soft_cap >= 0
    wanted = (
        "q must be floating [B, H, head_dim], keys and values [B, S, K, head_dim] of the same dtype and device with H a multiple "
        "of K, lengths [B], and soft_cap not negative"
    )
    require(fits, "cached_attention", wanted, q, keys, values, lengths)
    batch, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    places = key_places(keys.shape[1], q.device)
    seen = torch.arange(places, device=q.device) < lengths[:, None]
    # the heads that share a key head stand in the place of query positions, so that no key is repeated
    grouped = padded(q.view(batch, kv_heads, group, head_dim), group if q.is_cuda else max(group, FEW))
    keys, values = (padded(x.transpose(1, 2), places) for x in (keys, values))
    if soft_cap:
        out = attend_cached(grouped, keys, values, seen, scale, soft_cap)
        return out[:, :, :group].reshape(batch, heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None, :], scale=scale)
    return out[:, :, :group].reshape(batch, heads, head_dim)
