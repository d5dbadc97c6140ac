"""Few queries of a key head: each is multiplied with the keys as they are, without tensor cores, which nearly idle then.

A tile is [slots, steps, head_dim]: a slot is a group of threads that holds one key at a time, and goes through its places
alone, with a peak, a total and a sum of its own. So there is nothing to wait for until the slots are merged at the end,
and loads of several places are on their way at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STEPS, WARPS = 8, 4
"""Places that a slot holds at once, and warps of a program."""
_LEAST = tl.constexpr(-1.0e30)  # of a slot that has seen nothing: finite, so that differences are numbers
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
    columns = triton.next_power_of_2(size)
    threads = min(32, max(1, columns * keys.dtype.itemsize // 16))  # that load a key, 16 bytes each
    slots = 32 * WARPS // threads
    _few_kernel[(kv_heads, batch, parts)](
        q, keys, values, table, lengths, out, partial, peak, total, scale * _LOG2_E, window, size,
        *q.stride(), *keys.stride(), *values.stride(), *table.stride(), lengths.stride(0), parts,
        GROUP=heads // kv_heads, COLUMNS=columns, SLOTS=slots, STEPS=STEPS, PAGE=page_size,
        WHOLE=parts == 1, WITHIN=window == 0 and page_size % (slots * STEPS) == 0, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _few_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, partial_ptr, peak_ptr, total_ptr, scale, window, D,
    q_b, q_h, q_d, k_p, k_s, k_h, k_d, v_p, v_s, v_h, v_d, table_b, table_w, length_b, parts,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr, PAGE: tl.constexpr,
    WHOLE: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    PLACES: tl.constexpr = SLOTS * STEPS
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(length_ptr + row * length_b).to(tl.int32)
    beginning = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - beginning, PLACES), parts)
    first = beginning + part * share * PLACES
    last = tl.minimum(first + share * PLACES, length)
    table_ptr += row * table_b
    k_ptr += kv_head * k_h
    v_ptr += kv_head * v_h
    column = tl.arange(0, COLUMNS)
    is_column = column < D
    q_ptr += row * q_b + kv_head * GROUP * q_h + column * q_d
    peaks = (tl.full([SLOTS], _LEAST, dtype=tl.float32),) * GROUP
    totals = (tl.zeros([SLOTS], dtype=tl.float32),) * GROUP
    mixed = (tl.zeros([SLOTS, COLUMNS], dtype=tl.float32),) * GROUP
    queries = peaks[:0]
    for i in tl.static_range(GROUP):
        query = tl.load(q_ptr + i * q_h, mask=is_column, other=0.0).to(tl.float32) * scale
        queries = queries + (query[None, None, :],)  # noqa: RUF005
    # slots stand first: threads go through the last dimension, then through the first
    inner = tl.arange(0, STEPS)[None, :] * SLOTS + tl.arange(0, SLOTS)[:, None]
    for start in range(first, last, PLACES):
        place = start + inner
        inside = place < last
        seen = inside[:, :, None] & is_column[None, None, :]
        if WITHIN:  # a page holds all of a tile
            page = tl.load(table_ptr + (start // PAGE) * table_w)
            within = start % PAGE + inner
        else:
            page = tl.load(table_ptr + (place // PAGE) * table_w, mask=inside, other=0)
            within = place % PAGE
        k_at = (page * k_p + within * k_s)[:, :, None] + (column * k_d)[None, None, :]
        v_at = (page * v_p + within * v_s)[:, :, None] + (column * v_d)[None, None, :]
        k = tl.load(k_ptr + k_at, mask=seen, other=0.0)
        v = tl.load(v_ptr + v_at, mask=seen, other=0.0)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        for i in tl.static_range(GROUP):
            score = tl.where(inside, tl.sum(k * queries[i], axis=2), -float("inf"))
            larger = tl.maximum(peaks[i], tl.max(score, axis=1))
            weight = tl.exp2(score - larger[:, None])
            shrink = tl.exp2(peaks[i] - larger)
            total = totals[i] * shrink + tl.sum(weight, axis=1)
            mix = mixed[i] * shrink[:, None] + tl.sum(weight[:, :, None] * v, axis=1)
            peaks = peaks[:i] + (larger,) + peaks[i + 1 :]  # noqa: RUF005
            totals = totals[:i] + (total,) + totals[i + 1 :]  # noqa: RUF005
            mixed = mixed[:i] + (mix,) + mixed[i + 1 :]  # noqa: RUF005
    heads = tl.num_programs(0) * GROUP
    for i in tl.static_range(GROUP):
        top = tl.max(peaks[i], axis=0)
        factor = tl.exp2(peaks[i] - top)
        total = tl.sum(totals[i] * factor, axis=0)
        mix = tl.sum(mixed[i] * factor[:, None], axis=0)
        line = row * heads + kv_head * GROUP + i
        if WHOLE:
            tl.store(out_ptr + line * D + column, (mix / total).to(out_ptr.dtype.element_ty), mask=is_column)
        else:
            line += part.to(tl.int64) * tl.num_programs(1) * heads
            tl.store(partial_ptr + line * D + column, mix, mask=is_column)
            tl.store(peak_ptr + line, top)
            tl.store(total_ptr + line, total)
