"""Packed attention in Triton, for scores that torch's kernels do not form: a soft cap, and any window with it.

Forward: a program takes some queries of one head of a document, and walks over the keys that they see. Backward: a program
takes some keys of one key head, and walks over the queries of every head that reads it, so that nothing is added up by
atomics; another kernel takes some queries again. Scores are made three times and never stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import exact, on_device_of, tanh

_LEAST = 16  # what a product on tensor cores takes


class Blocks(NamedTuple):
    """Tiles of a pass.

    Attributes:
        queries: of a tile.
        keys: of a tile.
        warps: of a program.
        stages: tiles whose loads are under way at once.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def forward_blocks(columns: int, wide: bool) -> Blocks:
    """The tiles of the forward, for heads of so many columns."""
    if wide:
        return Blocks(32, 32, 4, 1) if columns <= 128 else Blocks(16, 16, 4, 1)
    return Blocks(128, 128, 8, 2) if columns <= 128 else Blocks(64, 32, 4, 2)


def backward_blocks(columns: int, wide: bool) -> Blocks:
    """The tiles of the backward."""
    if wide:
        return Blocks(32, 32, 4, 1) if columns <= 64 else Blocks(16, 16, 4, 1)
    return Blocks(64, 64, 4, 2) if columns <= 128 else Blocks(32, 32, 4, 1)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    edges: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [N, H, head_dim], contiguous, and the logarithm of the sum of exponentials, float32 [H, N]."""
    count, heads, size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, count, dtype=torch.float32, device=q.device)
    columns = max(_LEAST, triton.next_power_of_2(size))
    blocks = forward_blocks(columns, q.dtype == torch.float32)
    if out.numel():
        with on_device_of(q):
            _forward_kernel[(triton.cdiv(longest, blocks.queries), heads, edges.shape[0] - 1)](
                q, k, v, out, lse, edges, scale, window, soft_cap, count, size,
                *q.stride(), *k.stride(), *v.stride(), GROUP=heads // k.shape[1], WINDOWED=window > 0,
                CAPPED=soft_cap > 0, EXACT=exact(q), QUERIES=blocks.queries, KEYS=blocks.keys, COLUMNS=columns,
                num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True,
            )  # fmt: skip
    return out, lse


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
    columns = max(_LEAST, triton.next_power_of_2(size))
    blocks = backward_blocks(columns, q.dtype == torch.float32)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    documents = edges.shape[0] - 1
    common = {
        "GROUP": heads // k.shape[1], "WINDOWED": window > 0, "CAPPED": soft_cap > 0, "EXACT": exact(q),
        "QUERIES": blocks.queries, "KEYS": blocks.keys, "COLUMNS": columns,
        "num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True,
    }  # fmt: skip
    with on_device_of(q):
        _delta_kernel[(count, heads)](
            dout,
            out,
            delta,
            count,
            size,
            *dout.stride(),
            *out.stride(),
            COLUMNS=columns,
            num_warps=1,
            enable_fp_fusion=True,
        )
        _keys_kernel[(triton.cdiv(longest, blocks.keys), k.shape[1], documents)](
            dout, q, k, v, lse, delta, dk, dv, edges, scale, window, soft_cap, count, size,
            *dout.stride(), *q.stride(), *k.stride(), *v.stride(), *dk.stride()[:2], **common,
        )  # fmt: skip
        _queries_kernel[(triton.cdiv(longest, blocks.queries), heads, documents)](
            dout, q, k, v, lse, delta, dq, edges, scale, window, soft_cap, count, size,
            *dout.stride(), *q.stride(), *k.stride(), *v.stride(), *dq.stride()[:2], **common,
        )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _tile(ptr, row, column, end, D, row_stride, column_stride, EXACT: tl.constexpr):
    """Some rows of a head, 0 where there are none."""
    inside = (row < end)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(ptr + at, mask=inside, other=0.0).to(EXACT)


@triton.jit
def _score(q, k, query, key, end, scale, window, cap, WINDOWED: tl.constexpr, CAPPED: tl.constexpr):
    """Scores of queries and keys, -inf where a key is not seen, and the slope of the cap."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    slope = 1.0
    if CAPPED:
        bent = tanh(score / cap)
        slope = 1 - bent * bent
        score = cap * bent
    seen = (query[:, None] >= key[None, :]) & (key < end)[None, :]
    if WINDOWED:
        seen = seen & (query[:, None] - key[None, :] < window)
    return tl.where(seen, score, -float("inf")), slope


@triton.jit
def absorb(score, v, peak, total, mixed, BINARY: tl.constexpr, ROUNDED: tl.constexpr, EXACT: tl.constexpr):
    """The largest score, the sum of exponentials, or of powers of 2, and the weighted values of queries, with more keys."""
    larger = tl.maximum(peak, tl.max(score, axis=1))
    weight = _power(score - larger[:, None], BINARY)
    shrink = _power(peak - larger, BINARY)
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(ROUNDED).to(EXACT), v.to(EXACT), mixed * shrink[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit
def _power(x, BINARY: tl.constexpr):
    return tl.exp2(x) if BINARY else tl.exp(x)


@triton.jit
def _document(edges_ptr, TAKEN: tl.constexpr):
    """Where a program's document begins and ends, and the first of so many tokens that it takes."""
    begin = tl.load(edges_ptr + tl.program_id(2)).to(tl.int32)
    end = tl.load(edges_ptr + tl.program_id(2) + 1).to(tl.int32)
    return begin, end, begin + tl.program_id(0) * TAKEN


@triton.jit
def _first_seen(begin, first, window, WINDOWED: tl.constexpr, KEYS: tl.constexpr):
    """The first key of the tiles of a document that a query sees."""
    return begin + tl.maximum(first - window + 1 - begin, 0) // KEYS * KEYS if WINDOWED else begin


@triton.jit
def _pulled(score, slope, lse, delta, dout, v):
    """Weights, and cotangents of what was bent; queries that are not there have a cotangent of 0, and add nothing."""
    weight = tl.exp(score - lse[:, None])
    dweight = tl.dot(dout, tl.trans(v), input_precision="ieee")
    return weight, weight * (dweight - delta[:, None]) * slope


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, edges_ptr, scale, window, cap, N, D,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d,
    GROUP: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    begin, end, first = _document(edges_ptr, QUERIES)
    if first < end:
        column = tl.arange(0, COLUMNS)
        query = first + tl.arange(0, QUERIES)
        q = _tile(q_ptr + head * q_h, query, column, end, D, q_n, q_d, EXACT)
        peak = tl.full([QUERIES], -1e30, dtype=tl.float32)
        total = tl.zeros([QUERIES], dtype=tl.float32)
        mixed = tl.zeros([QUERIES, COLUMNS], dtype=tl.float32)
        start = _first_seen(begin, first, window, WINDOWED, KEYS)
        for key_first in range(start, tl.minimum(first + QUERIES, end), KEYS):
            key = key_first + tl.arange(0, KEYS)
            k = _tile(k_ptr + head // GROUP * k_h, key, column, end, D, k_n, k_d, EXACT)
            score, _ = _score(q, k, query, key, end, scale, window, cap, WINDOWED, CAPPED)
            v = _tile(v_ptr + head // GROUP * v_h, key, column, end, D, v_n, v_d, EXACT)
            peak, total, mixed = absorb(score, v, peak, total, mixed, False, v_ptr.dtype.element_ty, EXACT)
        there = query < end
        total = tl.where(there, total, 1.0)
        out_at = query.to(tl.int64)[:, None] * (tl.num_programs(1) * D) + head * D + column[None, :]
        out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, out, mask=there[:, None] & (column < D)[None, :])
        tl.store(lse_ptr + head * N + query, peak + tl.log(total), mask=there)


@triton.jit
def _delta_kernel(
    dout_ptr, out_ptr, delta_ptr, N, D, dout_n, dout_h, dout_d, out_n, out_h, out_d, COLUMNS: tl.constexpr
):  # fmt: skip
    """The product of every result with its cotangent."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = column < D
    dout = tl.load(dout_ptr + row * dout_n + head * dout_h + column * dout_d, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row * out_n + head * out_h + column * out_d, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head * N + row, tl.sum(dout * out, axis=0))


@triton.jit
def _keys_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, edges_ptr, scale, window, cap, N, D,
    dout_n, dout_h, dout_d, q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d, dk_n, dk_h,
    GROUP: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    ROUNDED: tl.constexpr = q_ptr.dtype.element_ty
    kv_head = tl.program_id(1).to(tl.int64)
    begin, end, first = _document(edges_ptr, KEYS)
    if first < end:
        column = tl.arange(0, COLUMNS)
        key = first + tl.arange(0, KEYS)
        k = _tile(k_ptr + kv_head * k_h, key, column, end, D, k_n, k_d, EXACT)
        v = _tile(v_ptr + kv_head * v_h, key, column, end, D, v_n, v_d, EXACT)
        dk = tl.zeros([KEYS, COLUMNS], dtype=tl.float32)
        dv = tl.zeros([KEYS, COLUMNS], dtype=tl.float32)
        last = end
        if WINDOWED:
            last = tl.minimum(end, first + KEYS + window - 1)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            for query_first in range(begin + (first - begin) // QUERIES * QUERIES, last, QUERIES):
                query = query_first + tl.arange(0, QUERIES)
                there = query < end
                q = _tile(q_ptr + head * q_h, query, column, end, D, q_n, q_d, EXACT)
                dout = _tile(dout_ptr + head * dout_h, query, column, end, D, dout_n, dout_d, EXACT)
                lse = tl.load(lse_ptr + head * N + query, mask=there, other=0.0)
                delta = tl.load(delta_ptr + head * N + query, mask=there, other=0.0)
                score, slope = _score(q, k, query, key, end, scale, window, cap, WINDOWED, CAPPED)
                weight, dscore = _pulled(score, slope, lse, delta, dout, v)
                dv += tl.dot(tl.trans(weight.to(ROUNDED).to(EXACT)), dout, input_precision="ieee")
                dk += tl.dot(tl.trans(dscore.to(ROUNDED).to(EXACT)), q, input_precision="ieee")
        at = key.to(tl.int64)[:, None] * dk_n + kv_head * dk_h + column[None, :]
        inside = (key < end)[:, None] & (column < D)[None, :]
        tl.store(dk_ptr + at, (dk * scale).to(ROUNDED), mask=inside)
        tl.store(dv_ptr + at, dv.to(ROUNDED), mask=inside)


@triton.jit
def _queries_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, edges_ptr, scale, window, cap, N, D,
    dout_n, dout_h, dout_d, q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d, dq_n, dq_h,
    GROUP: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    ROUNDED: tl.constexpr = q_ptr.dtype.element_ty
    head = tl.program_id(1).to(tl.int64)
    begin, end, first = _document(edges_ptr, QUERIES)
    if first < end:
        column = tl.arange(0, COLUMNS)
        query = first + tl.arange(0, QUERIES)
        there = query < end
        q = _tile(q_ptr + head * q_h, query, column, end, D, q_n, q_d, EXACT)
        dout = _tile(dout_ptr + head * dout_h, query, column, end, D, dout_n, dout_d, EXACT)
        lse = tl.load(lse_ptr + head * N + query, mask=there, other=0.0)
        delta = tl.load(delta_ptr + head * N + query, mask=there, other=0.0)
        dq = tl.zeros([QUERIES, COLUMNS], dtype=tl.float32)
        start = _first_seen(begin, first, window, WINDOWED, KEYS)
        for key_first in range(start, tl.minimum(first + QUERIES, end), KEYS):
            key = key_first + tl.arange(0, KEYS)
            k = _tile(k_ptr + head // GROUP * k_h, key, column, end, D, k_n, k_d, EXACT)
            v = _tile(v_ptr + head // GROUP * v_h, key, column, end, D, v_n, v_d, EXACT)
            score, slope = _score(q, k, query, key, end, scale, window, cap, WINDOWED, CAPPED)
            _, dscore = _pulled(score, slope, lse, delta, dout, v)
            dq += tl.dot(dscore.to(ROUNDED).to(EXACT), k, input_precision="ieee")
        at = query.to(tl.int64)[:, None] * dq_n + head * dq_h + column[None, :]
        tl.store(dq_ptr + at, (dq * scale).to(ROUNDED), mask=there[:, None] & (column < D)[None, :])
