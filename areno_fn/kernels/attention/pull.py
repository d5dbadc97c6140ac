"""The backward of packed attention in Triton.

A program of the first kernel takes some queries, forms the product of their results with the cotangents, and leaves it for
the second one beside the logarithm of their sums, both padded so that a tile of them begins at a multiple of its size. A
program of the second kernel takes some keys; its scores stand on their side, so that weights are an operand of the next
product where they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from areno_fn.kernels.attention.tiles import (
    LOG2E,
    SPAN,
    bent,
    key_range,
    line,
    offsets,
    power,
    query_range,
    rows,
    seen,
    sloped,
)
from areno_fn.kernels.attention.triton import Blocks, bend, columns_of, near, sees_far
from areno_fn.kernels.launch import on_device_of


class KeyBlocks(NamedTuple):
    """Tiles of the cotangents of keys and values.

    Attributes:
        blocks: their sizes; the queries of a tile divide those of `queries_blocks`.
        apart: cotangents of keys and of values by programs of their own, where one does not hold both.
    """

    blocks: Blocks
    apart: bool


def queries_blocks(columns: int, wide: bool) -> Blocks:
    """The tiles of the cotangents of queries, for heads of so many columns."""
    if wide:
        return Blocks(32, 32, 4, 1) if columns <= 64 else Blocks(16, 16, 4, 1)
    return Blocks(64, 32, 4, 3) if columns <= 128 else Blocks(128, 32, 8, 2)


def keys_blocks(columns: int, wide: bool, far: bool) -> KeyBlocks:
    """The tiles of the cotangents of keys and values."""
    if wide:
        return KeyBlocks(Blocks(32, 32, 4, 1) if columns <= 64 else Blocks(16, 16, 4, 1), False)
    if far and columns <= 64:
        return KeyBlocks(Blocks(64, 64, 4, 3), False)
    return KeyBlocks(Blocks(32, 64, 4, 3 if far or columns <= 128 else 2), columns > 128)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    edges: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of q, k and v, contiguous."""
    count, heads, size = q.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not q.numel():
        return dq, dk, dv
    dout, q, k, v, out = (near(x) for x in (dout, q, k, v, out))
    columns, wide, documents = columns_of(size), q.dtype == torch.float32, edges.shape[0] - 1
    padded = (triton.cdiv(count, SPAN.value) + documents) * SPAN.value
    shift, delta = torch.empty(2, heads, padded, dtype=torch.float32, device=q.device)
    common = {
        "GROUP": heads // k.shape[1], "WINDOWED": window > 0, "BEND": bend(q.dtype, soft_cap), "NATIVE": q.is_cuda,
        "EVEN": size == columns, "COLUMNS": columns, "enable_fp_fusion": True,
    }  # fmt: skip
    blocks = queries_blocks(columns, wide)
    with on_device_of(q):
        _queries_kernel[(heads * documents, triton.cdiv(longest, blocks.queries))](
            dout, q, k, v, out, lse, shift, delta, dq, edges, scale, window, soft_cap, count, padded, size, heads,
            *dout.stride(), *q.stride(), *k.stride(), *v.stride(), *out.stride(), *dq.stride()[:2],
            QUERIES=blocks.queries, KEYS=blocks.keys, STAGES=blocks.stages, num_warps=blocks.warps, **common,
        )  # fmt: skip
        blocks, apart = keys_blocks(columns, wide, sees_far(longest, window, soft_cap))
        for which in ("values", "keys") if apart else ("both",):
            _keys_kernel[(k.shape[1] * documents, triton.cdiv(longest, blocks.keys))](
                dout, q, k, v, shift, delta, dk, dv, edges, scale, window, soft_cap, padded, size, k.shape[1],
                *dout.stride(), *q.stride(), *k.stride(), *v.stride(), *dk.stride()[:2], WHICH=which,
                QUERIES=blocks.queries, KEYS=blocks.keys, STAGES=blocks.stages, num_warps=blocks.warps, **common,
            )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _queries_turn(
    k, v, q, dout, shift, delta, dq, hides, scale, cap,
    BEND: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr, ROUNDED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The cotangent of some queries, with one more tile of keys."""
    factor, _, _ = line(scale, cap, BEND)
    x = bent(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, BEND, NATIVE)
    weight = power(x * factor - shift[:, None], NATIVE)
    if MASKED:
        weight = tl.where(hides, 0.0, weight)
    dweight = tl.dot(dout, tl.trans(v), input_precision="ieee")
    dscore = sloped(weight, x, BEND) * (dweight - delta[:, None])
    return tl.dot(dscore.to(ROUNDED).to(EXACT), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["window", "N"])
def _queries_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, shift_ptr, delta_ptr, dq_ptr, edges_ptr,
    scale, window, cap, N, PADDED, D, HEADS,
    dout_n, dout_h, dout_d, q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d, out_n, out_h, out_d, dq_n, dq_h,
    GROUP: tl.constexpr, WINDOWED: tl.constexpr, BEND: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = q_ptr.dtype.element_ty if NATIVE else tl.float32
    ROUNDED: tl.constexpr = q_ptr.dtype.element_ty
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    document = tl.program_id(0) // HEADS
    begin = tl.load(edges_ptr + document).to(tl.int32)
    end = tl.load(edges_ptr + document + 1).to(tl.int32)
    first = begin + (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if first < end:
        column = tl.arange(0, COLUMNS)
        place = tl.arange(0, KEYS)
        line_of = tl.arange(0, QUERIES)
        query = first + line_of
        there = query < end
        dout_at = offsets(line_of, column, dout_n, dout_d)
        dout = rows(dout_ptr + head * dout_h, first, dout_n, dout_at, query, column, end, D, EXACT, True, EVEN)
        out_at = offsets(line_of, column, out_n, out_d)
        out = rows(out_ptr + head * out_h, first, out_n, out_at, query, column, end, D, EXACT, True, EVEN)
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
        lse = tl.load(lse_ptr + head * N + query, mask=there, other=float("inf"))
        _, offset, short = line(scale, cap, BEND)
        shift = lse * LOG2E - offset
        kept = head * PADDED + (tl.cdiv(begin, SPAN) + document) * SPAN + (first - begin) + line_of
        tl.store(shift_ptr + kept, shift)
        tl.store(delta_ptr + kept, delta)
        q_at = offsets(line_of, column, q_n, q_d)
        q = rows(q_ptr + head * q_h, first, q_n, q_at, query, column, end, D, EXACT, True, EVEN)
        k_ptr += head // GROUP * k_h
        v_ptr += head // GROUP * v_h
        k_at = offsets(place, column, k_n, k_d)
        v_at = offsets(place, column, v_n, v_d)
        dq = tl.zeros([QUERIES, COLUMNS], dtype=tl.float32)
        hidden, clear, whole, last = key_range(begin, end, first, window, WINDOWED, QUERIES, KEYS)
        for key_first in tl.range(clear, whole, KEYS, num_stages=STAGES):
            key = key_first + place
            k = rows(k_ptr, key_first, k_n, k_at, key, column, end, D, EXACT, False, EVEN)
            v = rows(v_ptr, key_first, v_n, v_at, key, column, end, D, EXACT, False, EVEN)
            dq = _queries_turn(k, v, q, dout, shift, delta, dq, key, scale, cap, BEND, False, NATIVE, ROUNDED, EXACT)
        for turn in tl.range(0, hidden + tl.cdiv(last - whole, KEYS), num_stages=STAGES):
            key_first = tl.where(turn < hidden, clear + (turn - hidden) * KEYS, whole + (turn - hidden) * KEYS)
            key = key_first + place
            k = rows(k_ptr, key_first, k_n, k_at, key, column, end, D, EXACT, True, EVEN)
            v = rows(v_ptr, key_first, v_n, v_at, key, column, end, D, EXACT, True, EVEN)
            hides = ~seen(query[:, None], key[None, :], end, window, WINDOWED)
            dq = _queries_turn(k, v, q, dout, shift, delta, dq, hides, scale, cap, BEND, True, NATIVE, ROUNDED, EXACT)
        at = query.to(tl.int64)[:, None] * dq_n + head * dq_h + column[None, :]
        tl.store(dq_ptr + at, (dq * short).to(ROUNDED), mask=there[:, None] & (column < D)[None, :])


@triton.jit
def _keys_turn(
    q, dout, k, v, shift, delta, dk, dv, hides, scale, cap,
    WHICH: tl.constexpr, BEND: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr, ROUNDED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The cotangents of some keys and values, with one more tile of queries; scores have a row for every key."""
    factor, _, _ = line(scale, cap, BEND)
    x = bent(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, cap, BEND, NATIVE)
    weight = power(x * factor - shift[None, :], NATIVE)
    if MASKED:
        weight = tl.where(hides, 0.0, weight)
    if WHICH != "keys":
        dv = tl.dot(weight.to(ROUNDED).to(EXACT), dout, dv, input_precision="ieee")
    if WHICH != "values":
        dweight = tl.dot(v, tl.trans(dout), input_precision="ieee")
        dscore = sloped(weight, x, BEND) * (dweight - delta[None, :])
        dk = tl.dot(dscore.to(ROUNDED).to(EXACT), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["window"])
def _keys_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, shift_ptr, delta_ptr, dk_ptr, dv_ptr, edges_ptr,
    scale, window, cap, PADDED, D, HEADS,
    dout_n, dout_h, dout_d, q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d, dk_n, dk_h,
    WHICH: tl.constexpr, GROUP: tl.constexpr, WINDOWED: tl.constexpr, BEND: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = q_ptr.dtype.element_ty if NATIVE else tl.float32
    ROUNDED: tl.constexpr = q_ptr.dtype.element_ty
    kv_head = (tl.program_id(0) % HEADS).to(tl.int64)
    document = tl.program_id(0) // HEADS
    begin = tl.load(edges_ptr + document).to(tl.int32)
    end = tl.load(edges_ptr + document + 1).to(tl.int32)
    first = begin + tl.program_id(1) * KEYS
    if first < end:
        column = tl.arange(0, COLUMNS)
        place = tl.arange(0, QUERIES)
        line_of = tl.arange(0, KEYS)
        key = first + line_of
        k_at = offsets(line_of, column, k_n, k_d)
        k = rows(k_ptr + kv_head * k_h, first, k_n, k_at, key, column, end, D, EXACT, True, EVEN)
        v = k
        if WHICH != "values":
            v_at = offsets(line_of, column, v_n, v_d)
            v = rows(v_ptr + kv_head * v_h, first, v_n, v_at, key, column, end, D, EXACT, True, EVEN)
        dk = tl.zeros([KEYS, COLUMNS] if WHICH != "values" else [1, 1], dtype=tl.float32)
        dv = tl.zeros([KEYS, COLUMNS] if WHICH != "keys" else [1, 1], dtype=tl.float32)
        q_at = offsets(place, column, q_n, q_d)
        dout_at = offsets(place, column, dout_n, dout_d)
        kept = (tl.cdiv(begin, SPAN) + document) * SPAN - begin
        hidden, clear, whole, last = query_range(begin, end, first, window, WINDOWED, QUERIES, KEYS)
        parts = hidden + tl.cdiv(tl.maximum(last - whole, 0), QUERIES)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            q_here = q_ptr + head * q_h
            dout_here = dout_ptr + head * dout_h
            shift_here = shift_ptr + head * PADDED
            delta_here = delta_ptr + head * PADDED
            for turn in tl.range(0, parts, num_stages=STAGES):
                query_first = tl.where(
                    turn < hidden, clear + (turn - hidden) * QUERIES, whole + (turn - hidden) * QUERIES
                )
                query = query_first + place
                q = rows(q_here, query_first, q_n, q_at, query, column, end, D, EXACT, True, EVEN)
                dout = rows(dout_here, query_first, dout_n, dout_at, query, column, end, D, EXACT, True, EVEN)
                at = tl.multiple_of(kept + query_first, QUERIES)
                shift = tl.load(shift_here + at + place)
                delta = tl.load(delta_here + at + place)
                hides = ~seen(query[None, :], key[:, None], end, window, WINDOWED)
                dk, dv = _keys_turn(
                    q, dout, k, v, shift, delta, dk, dv, hides, scale, cap, WHICH, BEND, True, NATIVE, ROUNDED, EXACT
                )
            for query_first in tl.range(clear, whole, QUERIES, num_stages=STAGES):
                query = query_first + place
                q = rows(q_here, query_first, q_n, q_at, query, column, end, D, EXACT, False, EVEN)
                dout = rows(dout_here, query_first, dout_n, dout_at, query, column, end, D, EXACT, False, EVEN)
                at = tl.multiple_of(kept + query_first, QUERIES)
                shift = tl.load(shift_here + at + place)
                delta = tl.load(delta_here + at + place)
                dk, dv = _keys_turn(
                    q, dout, k, v, shift, delta, dk, dv, key, scale, cap, WHICH, BEND, False, NATIVE, ROUNDED, EXACT
                )
        at = key.to(tl.int64)[:, None] * dk_n + kv_head * dk_h + column[None, :]
        inside = (key < end)[:, None] & (column < D)[None, :]
        if WHICH != "values":
            tl.store(dk_ptr + at, (dk * line(scale, cap, BEND)[2]).to(ROUNDED), mask=inside)
        if WHICH != "keys":
            tl.store(dv_ptr + at, dv.to(ROUNDED), mask=inside)
