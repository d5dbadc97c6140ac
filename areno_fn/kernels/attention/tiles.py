"""What the attention kernels in Triton share: tiles of rows, the pairs that are seen, and how a soft cap bends a score.

With `x = 1 / (1 + exp(2 s / cap))`, `tanh(s / cap) = 1 - 2 x`: two operations of the special function unit, and an absolute
error of a few roundings of 1, which is all that a softmax sees. The bent score is a line in `x` and its slope is
`4 (x - x^2)`. Scores are in powers of two from the first product on, so that an exponential is one instruction.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from areno_fn.kernels.launch import tanh

LOG2E, LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2.0))
SPAN = tl.constexpr(128)
"""Rows to a multiple of which documents are padded where numbers of a row are kept beside each other."""


@triton.jit
def power(x, NATIVE: tl.constexpr):
    """2^x."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def inverse(x, NATIVE: tl.constexpr):
    """1 / x."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1 / x


@triton.jit
def bent(product, scale, cap, BEND: tl.constexpr, NATIVE: tl.constexpr):
    """Of products of queries and keys, what `line` makes scores of: themselves, or their bend."""
    if BEND == "none":
        return product
    if BEND == "fine":
        return tanh(product * (scale / cap))
    if BEND == "instruction":
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [product * (scale / cap)], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse(1 + power(product * (2 * LOG2E * scale / cap), NATIVE), NATIVE)


@triton.jit
def line(scale, cap, BEND: tl.constexpr):
    """Factor and offset that make a score, in powers of two, of what `bent` gives; and what `slope` is short of."""
    if BEND == "none":
        return scale * LOG2E, 0.0, scale
    if BEND == "quick":
        return cap * (-2 * LOG2E), cap * LOG2E, 4 * scale
    return cap * LOG2E, 0.0, scale


@triton.jit
def sloped(weight, x, BEND: tl.constexpr):
    """Weights times the derivative of a score by the product, but for the last number of `line`; `x` is what `bent` gives."""
    if BEND == "none":
        return weight
    if BEND == "quick":
        return weight * (x - x * x)
    return weight * (1 - x * x)


@triton.jit
def offsets(place, column, row_stride, column_stride):
    """Where the elements of a tile lie, from its first one on; below 2^31, so that a register holds one."""
    return place[:, None] * row_stride + column[None, :] * column_stride


@triton.jit
def rows(ptr, first, stride, at, row, column, end, D, EXACT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """Some rows of a head, 0 where there are none. A load is only as wide as its mask allows, so that a whole tile has none."""
    here = ptr + tl.cast(first, tl.int64) * stride + at
    if MASKED:
        inside = (row < end)[:, None] if EVEN else (row < end)[:, None] & (column < D)[None, :]
        return tl.load(here, mask=inside, other=0.0).to(EXACT)
    if EVEN:
        return tl.load(here).to(EXACT)
    return tl.load(here, mask=(column < D)[None, :], other=0.0).to(EXACT)


@triton.jit
def seen(query, key, end, window, WINDOWED: tl.constexpr):
    """Which keys are seen."""
    found = (query >= key) & (key < end)
    return found & (query - key < window) if WINDOWED else found


@triton.jit
def key_range(begin, end, first, window, WINDOWED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Of the keys that some queries see: how many tiles are seen in part before, where whole ones begin and end, the end."""
    last = tl.minimum(first + QUERIES, end)
    whole = begin + (first - begin) // KEYS * KEYS
    clear = begin
    hidden = 0
    if WINDOWED:
        clear = begin + tl.cdiv(tl.maximum(first + QUERIES - window - begin, 0), KEYS) * KEYS
        clear = tl.minimum(clear, whole)
        start = begin + tl.maximum(first - window + 1 - begin, 0) // KEYS * KEYS
        hidden = tl.maximum(clear - start, 0) // KEYS
    return hidden, clear, whole, last


@triton.jit
def query_range(begin, end, first, window, WINDOWED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Of the queries that see some keys: how many tiles see them in part before, where whole ones begin and end, the end."""
    last = end
    bound = end
    if WINDOWED:
        last = tl.minimum(end, first + KEYS + window - 1)
        bound = tl.minimum(end, first + window)
    start = begin + (first - begin) // QUERIES * QUERIES
    diagonal = tl.minimum(first + KEYS, last)
    clear = begin + tl.cdiv(diagonal - begin, QUERIES) * QUERIES
    whole = tl.maximum(begin + (bound - begin) // QUERIES * QUERIES, clear)
    return (clear - start) // QUERIES, clear, whole, last


@triton.jit
def absorb(score, v, peak, total, mixed, BINARY: tl.constexpr, ROUNDED: tl.constexpr, EXACT: tl.constexpr):
    """The largest score, the sum of exponentials, or of powers of 2, and the weighted values of queries, with more keys."""
    larger = tl.maximum(peak, tl.max(score, axis=1))
    weight = _exponential(score - larger[:, None], BINARY)
    shrink = _exponential(peak - larger, BINARY)
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(ROUNDED).to(EXACT), v.to(EXACT), mixed * shrink[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit
def _exponential(x, BINARY: tl.constexpr):
    return tl.exp2(x) if BINARY else tl.exp(x)
