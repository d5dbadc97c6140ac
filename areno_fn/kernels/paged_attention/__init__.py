"""`paged_attention`: one query a row attends to keys and values that lie in pages."""

from __future__ import annotations

import importlib

import torch

from areno_fn.kernels.backend import backend, implementation, require
from areno_fn.kernels.paged_attention import reference

__all__ = ["paged_attention", "write_pages"]


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    longest: int | None = None,
) -> torch.Tensor:
    """Softmax attention of one query a row over the row's own places, found through a table of pages.

    `o = sum_j p_j v_j` with `p = softmax_j(s_j)` over the last `window` of the places j < length (all when it is 0), and
    `s_j = scale * q . k_j`, or `cap * tanh(scale * q . k_j / cap)` with a soft cap, as in `packed_attention`; place j of
    row b is `keys[table[b, j // size], j % size]`. Head h of q reads head h // (H / K). There is no gradient.

    Args:
        q: [B, H, head_dim], floating.
        keys: [P, size, K, head_dim], with H a multiple of K; read only where a row's places are, though on the CPU
            what lies in the pages of the table must be finite. Fastest where a head's places lie together in a page.
        values: like `keys`.
        table: int64 [B, W], numbers of pages in [0, P).
        lengths: int64 [B], from 1 to W * size.
        scale: factor of the scores.
        window: how many places are seen, the row's last one included; 0 for all.
        soft_cap: what the absolute value of a score stays below; 0 for none.
        longest: the largest length or more, where it is known, so that no more of the table is looked at.

    Returns:
        [B, H, head_dim] in the dtype of `q`, contiguous.

    Raises:
        KernelError: shapes or dtypes do not fit each other, or there is no kernel for the device.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023;
        the split over places is that of Dao et al., "Flash-Decoding", 2023.
    """
    fits = q.ndim == 3 and keys.ndim == 4 and keys.shape == values.shape and keys.shape[3] == q.shape[2]
    fits = fits and keys.shape[2] > 0 and q.shape[1] % keys.shape[2] == 0 and q.dtype == keys.dtype == values.dtype
    fits = fits and table.ndim == 2 and table.shape[0] == q.shape[0] and lengths.shape == q.shape[:1]
    fits = fits and window >= 0 and soft_cap >= 0 and (longest is None or longest > 0)
    fits = fits and (table.shape[1] * keys.shape[1] > 0 or not q.shape[0])
    fits = fits and table.dtype == lengths.dtype == torch.int64 and q.is_floating_point()
    wanted = (
        "q must be [B, H, head_dim], keys and values [P, size, K, head_dim] of the same dtype with H a multiple of K, "
        "table int64 [B, W], lengths int64 [B], a place at least for every row, longest above 0, and neither the window nor the "
        "soft cap negative"
    )
    require(fits, "paged_attention", wanted, q, keys, values, table, lengths)
    places = table.shape[1] * keys.shape[1]
    out: torch.Tensor = _attend(
        q, keys, values, table, lengths, scale, window, places if longest is None else min(longest, places), soft_cap
    )
    return out


def write_pages(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor
) -> None:
    """Writes keys and values of tokens to their places: `keys[p // size, p % size] = k[i]` for p = `places[i]`.

    Args:
        k: [N, K, head_dim].
        v: like `k`.
        keys: [P, size, K, head_dim]; written to.
        values: like `keys`.
        places: int64 [N], distinct but for place 0, which holds any of what is written to it.

    Raises:
        KernelError: shapes or dtypes do not fit each other, or there is no kernel for the device.
    """
    fits = k.ndim == 3 and k.shape == v.shape and places.shape == k.shape[:1] and places.dtype == torch.int64
    fits = fits and keys.shape == values.shape and keys.shape[2:] == k.shape[1:] and k.dtype == v.dtype == keys.dtype
    wanted = (
        "k and v must be [N, K, head_dim], keys and values [P, size, K, head_dim] of the same dtype, places int64 [N]"
    )
    require(fits, "write_pages", wanted, k, v, keys, values, places)
    if backend("paged_attention", k, v, keys, values, places) == "reference":
        reference.write(k, v, keys, values, places)
    else:
        importlib.import_module("areno_fn.kernels.paged_attention.triton").write(k, v, keys, values, places)


_attend = implementation(
    "paged_attention",
    "forward",
    "(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor lengths, float scale, int window, int longest, "
    "float soft_cap=0.0) -> Tensor",
    reference.forward,
    lambda q, keys, values, table, lengths, scale, window, longest, soft_cap=0.0: q.new_empty(q.shape),
)
