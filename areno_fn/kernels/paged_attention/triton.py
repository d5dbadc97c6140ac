"""Paged attention in Triton: a program takes the query heads of one key head of one row, over a part of the row's places.

They are the rows of products on tensor cores, at least sixteen, and as few warps as can hold them have a program: what one
warp does alone waits for nobody, and many programs on a processor keep its loads on their way. Rows are cut into so many
parts that a small batch keeps the whole chip busy; how many is decided by the shapes alone, so that a captured launch fits
every length. Parts are merged by a second kernel in a fixed order. Sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.attention.tiles import absorb
from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import ROUNDING, exact, on_device_of, tanh

PROGRAMS = 1024
"""Programs that keep the largest chip busy."""
PLACES, STAGES = 32, 3
"""Places a program looks at together, and how many steps of its loop are on their way."""
_HEADS = 16  # the least that a product on tensor cores takes
_HELD = 2048  # numbers of a result that a warp can hold
_LEAST = 64  # places of a part
_LOG2_E = 1.4426950408889634


def forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
    longest: int,
    soft_cap: float = 0.0,
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
    group, page_size = heads // kv_heads, keys.shape[1]
    rows, columns = max(_HEADS, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(size))
    warps = min(8, max(1, rows * columns // _HELD) * (1 if q.dtype.itemsize == 2 else 4))
    with on_device_of(q):
        _part_kernel[(kv_heads, batch, parts)](
            q, keys, values, table, lengths, out, partial, peak, total, scale * _LOG2_E, window,
            soft_cap * _LOG2_E, size,
            *q.stride(), *_outer(keys), *_outer(values), *table.stride(), lengths.stride(0), parts,
            K_S=keys.stride(1), V_S=values.stride(1), GROUP=group, HEADS=rows, COLUMNS=columns, PLACES=PLACES,
            PAGE=page_size, WHOLE=parts == 1, CAPPED=soft_cap > 0, WITHIN=window == 0 and page_size % PLACES == 0, EXACT=exact(q),
            num_warps=warps, num_stages=STAGES, enable_fp_fusion=True,
        )  # fmt: skip
        if parts > 1:
            _merge_kernel[(batch * heads,)](
                partial, peak, total, out, batch * heads, size, parts,
                PARTS=triton.next_power_of_2(parts), COLUMNS=columns, num_warps=4, **ROUNDING,
            )  # fmt: skip
    return out


def _outer(pages: torch.Tensor) -> tuple[int, int, int]:
    """Strides but for that of a place, which a kernel takes as a constant, so that places are told by fixed distances."""
    return pages.stride(0), pages.stride(2), pages.stride(3)


def write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """Writes keys and values of tokens to their places."""
    count, heads, size = k.shape
    if k.numel():
        with on_device_of(k):
            _write_kernel[(count,)](
                k, v, keys, values, places, keys.shape[1], heads, size, *k.stride(), *v.stride(),
                *keys.stride(), *values.stride(), places.stride(0),
                HEADS=triton.next_power_of_2(heads), COLUMNS=triton.next_power_of_2(size), num_warps=4, enable_fp_fusion=True,
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
def _part_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, partial_ptr, peak_ptr, total_ptr, scale, window, cap, D,
    q_b, q_h, q_d, k_p, k_h, k_d, v_p, v_h, v_d, table_b, table_w, length_b, parts, K_S: tl.constexpr, V_S: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
    CAPPED: tl.constexpr, WITHIN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(length_ptr + row * length_b)
    beginning = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    blocks = tl.cdiv(length - beginning, PLACES)
    share = tl.cdiv(blocks, parts)
    first = beginning + part * share * PLACES
    last = tl.minimum(first + share * PLACES, length)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    is_head = head < GROUP
    is_column = column < D
    some = is_head[:, None] & is_column[None, :]
    q_at = row * q_b + (kv_head * GROUP + head)[:, None] * q_h + column[None, :] * q_d
    q = tl.load(q_ptr + q_at, mask=some, other=0.0)
    peak = tl.full([HEADS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    mixed = tl.zeros([HEADS, COLUMNS], dtype=tl.float32)
    for start in range(first, last, PLACES):
        place = start + tl.arange(0, PLACES)
        inside = place < last
        if WITHIN:  # a page holds all of them
            page = tl.load(table_ptr + row * table_b + (start // PAGE) * table_w)
            within = start % PAGE + tl.arange(0, PLACES)
        else:
            page = tl.load(table_ptr + row * table_b + (place // PAGE) * table_w, mask=inside, other=0)[:, None]
            within = place % PAGE
        seen = inside[:, None] & is_column[None, :]
        k_at = k_ptr + page * k_p + kv_head * k_h + (within * K_S)[:, None] + column[None, :] * k_d
        k = tl.load(k_at, mask=seen, other=0.0)
        score = tl.dot(q.to(EXACT), tl.trans(k.to(EXACT)), input_precision="ieee") * scale
        if CAPPED:
            score = cap * tanh(score / cap)
        score = tl.where(inside[None, :], score, -float("inf"))
        v_at = v_ptr + page * v_p + kv_head * v_h + (within * V_S)[:, None] + column[None, :] * v_d
        v = tl.load(v_at, mask=seen, other=0.0)
        peak, total, mixed = absorb(score, v, peak, total, mixed, True, v.dtype, EXACT)
    out_head = kv_head * GROUP + head
    heads = tl.num_programs(0) * GROUP
    line = row * heads + out_head
    if WHOLE:
        out = mixed / total[:, None]
        tl.store(out_ptr + line[:, None] * D + column[None, :], out.to(out_ptr.dtype.element_ty), mask=some)
    else:
        line += part.to(tl.int64) * tl.num_programs(1) * heads
        tl.store(partial_ptr + line[:, None] * D + column[None, :], mixed, mask=some)
        tl.store(peak_ptr + line, peak, mask=is_head)
        tl.store(total_ptr + line, total, mask=is_head)


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
