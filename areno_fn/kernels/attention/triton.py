"""Packed attention in Triton: documents of any lengths, windows, and scores under a soft cap.

Forward: a program takes some queries of one head of a document, and walks over the keys that they see. Backward
(`pull.py`): a program takes some queries again, another one some keys of one key head, and walks over the queries of every head
that reads it, so that nothing is added up by atomics. Scores are made three times and never stored. Tiles that are seen as a whole
have no mask. Programs that walk farthest begin first.

The largest score is taken off even where a cap bounds all of them: the largest weight of a query is then 1, which is not
rounded. What it would lose otherwise all columns of a result would have in common, and gradients would be off by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from areno_fn.kernels.attention.tiles import LN2, bent, key_range, line, offsets, power, rows, seen
from areno_fn.kernels.launch import on_device_of

_LEAST = 16  # what a product on tensor cores takes
_QUICK = 1024.0
"""The largest cap of which the roundings of a quick bend, times the cap, are far below those of a score in 16 bits."""


class Blocks(NamedTuple):
    """Tiles of a pass.

    Attributes:
        queries: of a tile, at most 128.
        keys: of a tile.
        warps: of a program.
        stages: tiles whose loads are under way at once.
    """

    queries: int
    keys: int
    warps: int
    stages: int


FAR = 1024
"""Keys that a query sees at most, from which on tiles without a cap are larger."""


def forward_blocks(columns: int, wide: bool, far: bool) -> Blocks:
    """The tiles of the forward, for heads of so many columns, and for queries that see far and without a cap."""
    if wide:
        return Blocks(32, 32, 4, 1) if columns <= 128 else Blocks(16, 16, 4, 1)
    return Blocks(64, 64 if far else 32, 4, 3) if columns <= 128 else Blocks(128, 64, 8, 2)


def sees_far(longest: int, window: int, soft_cap: float) -> bool:
    """Whether larger tiles are worth it."""
    return not soft_cap and min(longest, window or longest) >= FAR


def bend(dtype: torch.dtype, soft_cap: float) -> str:
    """How a kernel forms the cap: as exactly as float32 can, or as softmax in a narrower dtype can tell.

    The error of a quick bend is a few roundings of the cap, not of the score.
    """
    if not soft_cap:
        return "none"
    return "fine" if dtype == torch.float32 or soft_cap > _QUICK else "quick"


def folds(scale: float, soft_cap: float) -> bool:
    """Whether the largest product is the largest score, so that a weight is one fused operation from a product."""
    return soft_cap > 0 or scale > 0


def near(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where rows are so far apart that the places of a tile would not be 32-bit numbers."""
    return x if 128 * x.stride(0) + x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def columns_of(size: int) -> int:
    """Columns of the tiles of heads of that size."""
    return max(_LEAST, triton.next_power_of_2(size))


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
    columns = columns_of(size)
    blocks = forward_blocks(columns, q.dtype == torch.float32, sees_far(longest, window, soft_cap))
    q, k, v = (near(x) for x in (q, k, v))
    if out.numel():
        with on_device_of(q):
            _forward_kernel[(heads * (edges.shape[0] - 1), triton.cdiv(longest, blocks.queries))](
                q, k, v, out, lse, edges, scale, window, soft_cap, count, size, heads,
                *q.stride(), *k.stride(), *v.stride(), GROUP=heads // k.shape[1], WINDOWED=window > 0,
                BEND=bend(q.dtype, soft_cap), RISING=folds(scale, soft_cap), NATIVE=q.is_cuda, EVEN=size == columns,
                QUERIES=blocks.queries, KEYS=blocks.keys, COLUMNS=columns, STAGES=blocks.stages, num_warps=blocks.warps,
                enable_fp_fusion=True,
            )  # fmt: skip
    return out, lse


@triton.jit
def _absorb(
    product, v, hides, peak, total, mixed, scale, cap,
    BEND: tl.constexpr, RISING: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr, ROUNDED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The largest score, the sum of exponentials and the weighted values of some queries, with one more tile of keys."""
    factor, _, _ = line(scale, cap, BEND)
    x = bent(product, scale, cap, BEND, NATIVE)
    # the offset of all scores is left out, and a score falls as a quick `x` rises: a weight is one fused operation from it
    if BEND == "quick":
        if MASKED:
            x = tl.where(hides, float("inf"), x)
        larger = tl.maximum(peak, tl.min(x, axis=1) * factor)
        weight = power(x * factor - larger[:, None], NATIVE)
    elif RISING:
        if MASKED:
            x = tl.where(hides, -float("inf"), x)
        larger = tl.maximum(peak, tl.max(x, axis=1) * factor)
        weight = power(x * factor - larger[:, None], NATIVE)
    else:
        score = x * factor
        if MASKED:
            score = tl.where(hides, -float("inf"), score)
        larger = tl.maximum(peak, tl.max(score, axis=1))
        weight = power(score - larger[:, None], NATIVE)
    shrink = power(peak - larger, NATIVE)
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(ROUNDED).to(EXACT), v, mixed * shrink[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit(do_not_specialize=["window", "N"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, edges_ptr, scale, window, cap, N, D, HEADS,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d,
    GROUP: tl.constexpr, WINDOWED: tl.constexpr, BEND: tl.constexpr, RISING: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # the interpreter would multiply the bits of bfloat16 as if they were integers
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
        q_at = offsets(line_of, column, q_n, q_d)
        q = rows(q_ptr + head * q_h, first, q_n, q_at, query, column, end, D, EXACT, True, EVEN)
        k_ptr += head // GROUP * k_h
        v_ptr += head // GROUP * v_h
        k_at = offsets(place, column, k_n, k_d)
        v_at = offsets(place, column, v_n, v_d)
        peak = tl.full([QUERIES], -1e30, dtype=tl.float32)
        total = tl.zeros([QUERIES], dtype=tl.float32)
        mixed = tl.zeros([QUERIES, COLUMNS], dtype=tl.float32)
        hidden, clear, whole, last = key_range(begin, end, first, window, WINDOWED, QUERIES, KEYS)
        for key_first in tl.range(clear, whole, KEYS, num_stages=STAGES):
            key = key_first + place
            k = rows(k_ptr, key_first, k_n, k_at, key, column, end, D, EXACT, False, EVEN)
            v = rows(v_ptr, key_first, v_n, v_at, key, column, end, D, EXACT, False, EVEN)
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            peak, total, mixed = _absorb(
                product, v, key, peak, total, mixed, scale, cap, BEND, RISING, False, NATIVE, ROUNDED, EXACT
            )
        for turn in tl.range(0, hidden + tl.cdiv(last - whole, KEYS), num_stages=STAGES):
            key_first = tl.where(turn < hidden, clear + (turn - hidden) * KEYS, whole + (turn - hidden) * KEYS)
            key = key_first + place
            k = rows(k_ptr, key_first, k_n, k_at, key, column, end, D, EXACT, True, EVEN)
            v = rows(v_ptr, key_first, v_n, v_at, key, column, end, D, EXACT, True, EVEN)
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            hides = ~seen(query[:, None], key[None, :], end, window, WINDOWED)
            peak, total, mixed = _absorb(
                product, v, hides, peak, total, mixed, scale, cap, BEND, RISING, True, NATIVE, ROUNDED, EXACT
            )
        there = query < end
        total = tl.where(there, total, 1.0)
        out_at = query.to(tl.int64)[:, None] * (HEADS * D) + head * D + column[None, :]
        out = (mixed / total[:, None]).to(ROUNDED)
        tl.store(out_ptr + out_at, out, mask=there[:, None] & (column < D)[None, :])
        _, offset, _ = line(scale, cap, BEND)
        tl.store(lse_ptr + head * N + query, (peak + offset + tl.log2(total)) * LN2, mask=there)
