"""Attention in Triton whose sums over keys have one order: blocks of `PLACES` keys, from a document's first one on.

Training and reading texts take many queries of a document together, decoding takes one; `_absorb` is what both do with a
block of keys. A block that a query does not see adds exact zeros. So a query has the same bits wherever it is asked.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from areno_fn.kernels.attention.fused import dense
from areno_fn.kernels.attention.layout import PackedLayout
from areno_fn.kernels.attention.tiles import absorb
from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import ROUNDING, exact, on_device_of

PLACES = 64
"""Keys of a block."""
QUERIES, WARPS, STAGES, LAST = 128, 8, 3, 1
"""Of a program over packed documents."""
OVER_PAGES = ((16, 1, 2), (64, 4, 2))
"""Rows, warps and stages of a program over pages, for as many query heads of one key head as there are rows, most of which are
empty. A row lies in one warp, as it does in documents, so that the sum of its exponentials has the same order: with 16 rows, two or
four warps would share a row."""
WIDEST = 128
"""The most channels of a head, of which blocks fit into shared memory."""
_LOG2E, _LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2.0))


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attended values [N, H, head_dim], and the logarithms of sums of exponentials in the shape that `fused` keeps."""
    _fits(q)
    q, k, v = (_near(x) for x in (q, k, v))
    count, heads, size = q.shape
    out = torch.empty(count, heads, size, dtype=q.dtype, device=q.device)
    documents, longest = layout.documents, layout.longest
    beside = dense(q, layout)
    shape = (documents, heads, longest, 1) if beside else (heads, count)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    by_head, by_token = (longest, heads) if beside else (count, 1)
    edges = layout.edges
    if out.numel():
        with on_device_of(q):
            _packed_kernel[(triton.cdiv(longest, QUERIES), heads, documents)](
                q, k, v, out, sums, q if edges is None else edges, longest, scale, size, by_head, by_token,
                *q.stride(), *k.stride(), *v.stride(), GROUP=heads // k.shape[1], EQUAL=edges is None,
                QUERIES=QUERIES, PLACES=PLACES, COLUMNS=_columns(size), EVEN=size == _columns(size), EXACT=exact(q),
                LAST=LAST, num_warps=WARPS, num_stages=STAGES, **ROUNDING,
            )  # fmt: skip
    return out, sums


def over_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The attended values [B, H, head_dim], contiguous."""
    _fits(q)
    batch, heads, size = q.shape
    out = torch.empty(batch, heads, size, dtype=q.dtype, device=q.device)
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    rows, warps, stages = next((found for found in OVER_PAGES if group <= found[0]), OVER_PAGES[-1])
    if out.numel():
        with on_device_of(q):
            _pages_kernel[(kv_heads, batch)](
                q, keys, values, table, lengths, out, scale, keys.shape[1], size, *q.stride(), *keys.stride(),
                *values.stride(), *table.stride(), lengths.stride(0), GROUP=group,
                ROWS=max(rows, triton.next_power_of_2(group)), PLACES=PLACES, COLUMNS=_columns(size),
                EVEN=size == _columns(size), EXACT=exact(q), num_warps=warps, num_stages=stages, **ROUNDING,
            )  # fmt: skip
    return out


def _fits(q: torch.Tensor) -> None:
    low = q.dtype in (torch.bfloat16, torch.float16)
    fits = q.shape[-1] <= WIDEST and (low or not q.is_cuda)
    wanted = f"on the GPU queries must be bfloat16 or float16, with heads of at most {WIDEST} channels"
    require(fits, "ordered_attention", wanted, q)


def _near(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where the rows of a tile are so far apart that their places would not be 32-bit numbers."""
    return x if QUERIES * x.stride(0) + x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def _columns(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _absorb(q, k, v, seen, factor, peak, total, mixed, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """The largest score, the sum of exponentials and the weighted values of some queries, with one more block of keys."""
    score = tl.dot(q.to(EXACT), tl.trans(k.to(EXACT)), input_precision="ieee") * factor
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    return absorb(score, v, peak, total, mixed, True, v.dtype, EXACT)


@triton.jit(do_not_specialize=["longest"])
def _packed_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, edges_ptr, longest, scale, D, sums_h, sums_n,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d,
    GROUP: tl.constexpr, EQUAL: tl.constexpr, QUERIES: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # those that see most begin first
    if EQUAL:
        start = document * longest
        length = longest
    else:
        start = tl.load(edges_ptr + document).to(tl.int64)
        length = (tl.load(edges_ptr + document + 1) - start).to(tl.int32)
    if first < length:
        query = first + tl.arange(0, QUERIES)
        place = tl.arange(0, PLACES)
        column = tl.arange(0, COLUMNS)
        within = column < D
        there = (query < length)[:, None] & within[None, :]
        # a tile's places are 32-bit numbers from its first one on: with pointers of 64 bits registers would not do
        line = tl.arange(0, QUERIES)
        q_ptr += (start + first) * q_n + head * q_h
        q = tl.load(q_ptr + (line[:, None] * q_n + column[None, :] * q_d), mask=there, other=0.0)
        k_ptr += start * k_n + head // GROUP * k_h
        v_ptr += start * v_n + head // GROUP * v_h
        k_in = place[:, None] * k_n + column[None, :] * k_d
        v_in = place[:, None] * v_n + column[None, :] * v_d
        factor = scale * _LOG2E
        peak = tl.full([QUERIES], -float("inf"), dtype=tl.float32)
        total = tl.zeros([QUERIES], dtype=tl.float32)
        mixed = tl.zeros([QUERIES, COLUMNS], dtype=tl.float32)
        whole = first // PLACES * PLACES  # every query sees all keys before that one
        for begin in range(0, whole, PLACES):
            k_at = k_ptr + tl.cast(begin, tl.int64) * k_n + k_in
            v_at = v_ptr + tl.cast(begin, tl.int64) * v_n + v_in
            if EVEN:
                k = tl.load(k_at)
                v = tl.load(v_at)
            else:
                k = tl.load(k_at, mask=within[None, :], other=0.0)
                v = tl.load(v_at, mask=within[None, :], other=0.0)
            peak, total, mixed = _absorb(q, k, v, place, factor, peak, total, mixed, False, EXACT)
        for begin in tl.range(whole, tl.minimum(first + QUERIES, length), PLACES, num_stages=LAST):
            key = begin + place
            inside = (key < length)[:, None] & within[None, :]
            k = tl.load(k_ptr + tl.cast(begin, tl.int64) * k_n + k_in, mask=inside, other=0.0)
            v = tl.load(v_ptr + tl.cast(begin, tl.int64) * v_n + v_in, mask=inside, other=0.0)
            seen = (key[None, :] <= query[:, None]) & (key < length)[None, :]
            peak, total, mixed = _absorb(q, k, v, seen, factor, peak, total, mixed, True, EXACT)
        out = mixed / total[:, None]
        out_ptr += ((start + first) * tl.num_programs(1) + head) * D
        tl.store(
            out_ptr + (line[:, None] * (tl.num_programs(1) * D) + column[None, :]),
            out.to(out_ptr.dtype.element_ty),
            mask=there,
        )
        sums_at = sums_ptr + head * sums_h + start * sums_n + query
        tl.store(sums_at, (peak + tl.log2(total)) * _LN2, mask=query < length)


@triton.jit
def _pages_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, scale, page_size, D,
    q_b, q_h, q_d, k_p, k_s, k_h, k_d, v_p, v_s, v_h, v_d, table_b, table_w, length_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + row * length_b)
    head = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    within = column < D
    there = (head < GROUP)[:, None] & within[None, :]
    q_at = row * q_b + (kv_head * GROUP + head)[:, None] * q_h + column[None, :] * q_d
    q = tl.load(q_ptr + q_at, mask=there, other=0.0)
    factor = scale * _LOG2E
    peak = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, length, PLACES):
        place = begin + tl.arange(0, PLACES)
        seen = place < length
        page = tl.load(table_ptr + row * table_b + (place // page_size) * table_w, mask=seen, other=0)
        inner = place % page_size
        inside = seen[:, None] & within[None, :]
        k_at = (page * k_p + inner * k_s + kv_head * k_h)[:, None] + column[None, :] * k_d
        k = tl.load(k_ptr + k_at, mask=inside, other=0.0)
        v_at = (page * v_p + inner * v_s + kv_head * v_h)[:, None] + column[None, :] * v_d
        v = tl.load(v_ptr + v_at, mask=inside, other=0.0)
        peak, total, mixed = _absorb(q, k, v, seen[None, :], factor, peak, total, mixed, True, EXACT)
    out = mixed / total[:, None]
    line = row * tl.num_programs(0) * GROUP + kv_head * GROUP + head
    tl.store(out_ptr + line[:, None] * D + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there)
