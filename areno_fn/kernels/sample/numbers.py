"""What the kernels that draw share: noise, logits, and logits as integers that are ordered like them.

The words of `areno_fn.random` are SplitMix64's, of which `_mix` is the finaliser.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOBODY = tl.constexpr(1 << 62)


@triton.jit
def _mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _and_then(word, coordinate):
    """The word that a coordinate makes of the word before it."""
    return _mix(word + (coordinate.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def row_word(seed_ptr, counter_ptr, ids_ptr, positions_ptr, row, ids_m, positions_m):
    """The word of the key, the row's id and its position."""
    word = _and_then(tl.load(seed_ptr).to(tl.uint64), tl.load(counter_ptr))
    word = _and_then(word, tl.load(ids_ptr + row * ids_m))
    return _and_then(word, tl.load(positions_ptr + row * positions_m))


@triton.jit
def noise(word, lane):
    """Gumbel numbers of lanes (int64), by way of float64, as float32."""
    word = _mix(_and_then(word, lane) ^ 0x9E3779B97F4A7C15)
    unit = ((word >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(unit))).to(tl.float32)


@triton.jit
def scaled(ptr, column, size, stride, TEMPERATURE: tl.constexpr, WIDE: tl.constexpr):
    """Logits over the temperature, -inf past the end of the row; the division is rounded as IEEE says."""
    NARROW: tl.constexpr = WIDE == tl.float32  # noqa: SIM300
    x = tl.load(ptr + column * stride, mask=column < size, other=-float("inf")).to(WIDE)
    if TEMPERATURE != 0.0 and TEMPERATURE != 1.0:
        x = tl.div_rn(x, tl.full(x.shape, TEMPERATURE, dtype=WIDE)) if NARROW else x / TEMPERATURE
    return x


@triton.jit
def better(score, lane, best, found):
    """The largest score and its lane, the smallest among equals; a block that has nothing larger changes nothing."""
    top = tl.max(score, axis=0)
    first = tl.min(tl.where(score == top, lane, NOBODY), axis=0)
    larger = (top > best) & (first < NOBODY)
    return tl.where(larger, top, best), tl.where(larger, first, found)


@triton.jit
def ordered(x, INT: tl.constexpr, BITS: tl.constexpr):
    """Integers in the order of floating numbers; -0 is 0."""
    bits = (x + 0.0).to(INT, bitcast=True)
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def number(order, WIDE: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr):
    """The floating number of an integer."""
    bits = tl.where(order < 0, order ^ ((1 << (BITS - 1)) - 1), order)
    return bits.to(WIDE, bitcast=True)
