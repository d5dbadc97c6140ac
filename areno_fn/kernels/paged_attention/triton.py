"""Paged attention in Triton: a program takes the query heads of one key head of one row, over a part of the row's places.

Few queries of a key head are multiplied one by one (`few.py`), many of them on tensor cores (`many.py`). Rows are cut into
so many parts that a small batch keeps the whole chip busy; how many is decided by the shapes alone, so that a captured
launch fits every length. Parts are merged by a second kernel in a fixed order. Sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import ROUNDING, on_device_of
from areno_fn.kernels.paged_attention import few, many

PROGRAMS = 1024
"""Programs that keep the largest chip busy."""
FEW = 4
"""Most query heads of a key head that are multiplied one by one."""
_LEAST = 64  # places of a part


def forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
    longest: int,
) -> torch.Tensor:
    """The attended values [B, H, head_dim], contiguous."""
    require(q.dtype != torch.float64, "paged_attention", "on the GPU queries must be float32, bfloat16 or float16", q)
    batch, heads, size = q.shape
    out = torch.empty(batch, heads, size, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    kv_heads = keys.shape[2]
    most = min(longest, window) if window else longest
    parts = max(1, min(triton.cdiv(PROGRAMS, batch * kv_heads), triton.cdiv(most, _LEAST)))
    partial = torch.empty(parts if parts > 1 else 0, batch, heads, size, dtype=torch.float32, device=q.device)
    peak, total = (torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    attend = few.attend if heads <= FEW * kv_heads else many.attend
    with on_device_of(q):
        attend(q, keys, values, table, lengths, out, partial, peak, total, scale, window, parts)
        if parts > 1:
            _merge_kernel[(batch * heads,)](
                partial, peak, total, out, batch * heads, size, parts,
                PARTS=triton.next_power_of_2(parts), COLUMNS=triton.next_power_of_2(size), num_warps=4, **ROUNDING,
            )  # fmt: skip
    return out


def write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """Writes keys and values of tokens to their places."""
    count, heads, size = k.shape
    if k.numel():
        with on_device_of(k):
            _write_kernel[(count,)](
                k, v, keys, values, places, keys.shape[1], heads, size, *k.stride(), *v.stride(),
                *keys.stride(), *values.stride(), places.stride(0),
                HEADS=triton.next_power_of_2(heads), COLUMNS=triton.next_power_of_2(size), num_warps=4,
            )  # fmt: skip


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, place_ptr, page_size, K, D, k_n, k_h, k_d, v_n, v_h, v_d,
    keys_p, keys_s, keys_h, keys_d, values_p, values_s, values_h, values_d, place_n,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    inside = (head < K) & (column < D)
    place = tl.load(place_ptr + token * place_n)
    page, within = place // page_size, place % page_size
    k = tl.load(k_ptr + token * k_n + head * k_h + column * k_d, mask=inside)
    tl.store(keys_ptr + page * keys_p + within * keys_s + head * keys_h + column * keys_d, k, mask=inside)
    v = tl.load(v_ptr + token * v_n + head * v_h + column * v_d, mask=inside)
    tl.store(values_ptr + page * values_p + within * values_s + head * values_h + column * values_d, v, mask=inside)


@triton.jit
def _merge_kernel(
    partial_ptr, peak_ptr, total_ptr, out_ptr, lines, D, parts, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = part < parts
    peak = tl.load(peak_ptr + part * lines + line, mask=there, other=-float("inf"))
    total = tl.load(total_ptr + part * lines + line, mask=there, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, axis=0))
    at = (part * lines + line)[:, None] * D + column[None, :]
    mixed = tl.load(partial_ptr + at, mask=there[:, None] & (column < D)[None, :], other=0.0)
    out = tl.sum(mixed * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out_ptr + line * D + column, out.to(out_ptr.dtype.element_ty), mask=column < D)
