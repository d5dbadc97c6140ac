"""Many queries of a key head: they are the rows of products on tensor cores, at least sixteen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PLACES, WARPS, STAGES = 64, 4, 3
"""Places a program looks at together, its warps, and how many loads are on their way."""
_HEADS = 16  # the least that a product on tensor cores takes
_LOG2_E = 1.4426950408889634


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor,
    scale: float,
    window: int,
    parts: int,
) -> None:
    """Writes the result, or with several parts what each of them has found."""
    batch, heads, size = q.shape
    page_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    _many_kernel[(kv_heads, batch, parts)](
        q, keys, values, table, lengths, out, partial, peak, total, scale * _LOG2_E, window, size,
        *q.stride(), *keys.stride(), *values.stride(), *table.stride(), lengths.stride(0), parts,
        GROUP=group, HEADS=max(_HEADS, triton.next_power_of_2(group)),
        COLUMNS=max(16, triton.next_power_of_2(size)), PLACES=PLACES, PAGE=page_size,
        WHOLE=parts == 1, NARROW=q.is_cuda, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@triton.jit
def _many_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, partial_ptr, peak_ptr, total_ptr, scale, window, D,
    q_b, q_h, q_d, k_p, k_s, k_h, k_d, v_p, v_s, v_h, v_d, table_b, table_w, length_b, parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
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
    # the interpreter would multiply the bits of bfloat16 as if they were integers
    EXACT: tl.constexpr = q_ptr.dtype.element_ty if NARROW else tl.float32
    peak = tl.full([HEADS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    mixed = tl.zeros([HEADS, COLUMNS], dtype=tl.float32)
    for start in range(first, last, PLACES):
        place = start + tl.arange(0, PLACES)
        inside = place < last
        page = tl.load(table_ptr + row * table_b + (place // PAGE) * table_w, mask=inside, other=0)
        within = place % PAGE
        seen = inside[:, None] & is_column[None, :]
        k_at = (page * k_p + within * k_s + kv_head * k_h)[:, None] + column[None, :] * k_d
        k = tl.load(k_ptr + k_at, mask=seen, other=0.0)
        score = tl.dot(q.to(EXACT), tl.trans(k.to(EXACT)), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, -float("inf"))
        larger = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - larger[:, None])
        shrink = tl.exp2(peak - larger)
        v_at = (page * v_p + within * v_s + kv_head * v_h)[:, None] + column[None, :] * v_d
        v = tl.load(v_ptr + v_at, mask=seen, other=0.0)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype).to(EXACT), v.to(EXACT), input_precision="ieee")
        peak = larger
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
