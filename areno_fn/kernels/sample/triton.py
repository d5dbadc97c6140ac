"""Drawing in Triton: the noise is made where it is added, so that the logits are read once and nothing else is written.

Where nothing is cut off, a row is shared out among several programs, and a second kernel merges what they found. With
rules, one program has a row: it searches the smallest logit that stays, by counting or adding up what lies above four
bounds at a time, and then draws from what is left. The logits are compared as integers that are ordered like them.

The words of `areno_fn.random` are SplitMix64's, of which `_mix` is the finaliser.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, wide

COLUMNS, WARPS = 2048, 8
PROGRAMS = 2048
"""Programs that keep the largest chip busy."""
_NOBODY = tl.constexpr(1 << 62)


def forward(
    logits: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [B], log-probabilities float32 [B], and how many tokens each was drawn among, int64 [B]."""
    count, size = logits.shape
    tokens, kept = (torch.empty(count, dtype=torch.int64, device=logits.device) for _ in range(2))
    logp = torch.empty(count, dtype=torch.float32, device=logits.device)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rules = temperature > 0 and (0 < top_k < size or top_p < 1 or min_p > 0)
    shared = {
        "TEMPERATURE": float(temperature), "LOWEST": torch.finfo(dtype).min, "WIDE": wide(logits),
        "COLUMNS": min(COLUMNS, triton.next_power_of_2(size)), "num_warps": WARPS, **ROUNDING,
    }  # fmt: skip
    if not count:
        return tokens, logp, kept
    with on_device_of(logits):
        if rules:
            _ruled_kernel[(count,)](
                logits, seed, counter, ids, positions, tokens, logp, kept, size, *logits.stride(),
                ids.stride(0), positions.stride(0), top_k,
                HAS_K=0 < top_k < size, TOP_P=float(top_p), HAS_MIN=min_p > 0, LOG_MIN=math.log(min_p or 1.0),
                INT=tl.int64 if dtype == torch.float64 else tl.int32, BITS=dtype.itemsize * 8, **shared,
            )  # fmt: skip
            return tokens, logp, kept
        kept.fill_(size)
        blocks = triton.cdiv(size, COLUMNS)
        parts = min(triton.cdiv(PROGRAMS, count), blocks)
        share = triton.cdiv(blocks, parts) * COLUMNS
        best, peak, total = (torch.empty(parts, count, dtype=dtype, device=logits.device) for _ in range(3))
        found = torch.empty(parts, count, dtype=torch.int64, device=logits.device)
        _part_kernel[(count, parts)](
            logits, seed, counter, ids, positions, best, found, peak, total, size, share, *logits.stride(),
            ids.stride(0), positions.stride(0), **shared,
        )  # fmt: skip
        _merge_kernel[(count,)](
            logits, best, found, peak, total, tokens, logp, count, parts, *logits.stride(),
            PARTS=triton.next_power_of_2(parts), **(shared | {"num_warps": 1}),
        )  # fmt: skip
    return tokens, logp, kept


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
def _row_word(seed_ptr, counter_ptr, ids_ptr, positions_ptr, row, ids_m, positions_m):
    """The word of the key, the row's id and its position."""
    word = _and_then(tl.load(seed_ptr).to(tl.uint64), tl.load(counter_ptr))
    word = _and_then(word, tl.load(ids_ptr + row * ids_m))
    return _and_then(word, tl.load(positions_ptr + row * positions_m))


@triton.jit
def _noise(word, column):
    """Gumbel numbers of tokens, by way of float64, as float32."""
    word = _mix(_and_then(word, column) ^ 0x9E3779B97F4A7C15)
    unit = ((word >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(unit))).to(tl.float32)


@triton.jit
def _logits(ptr, column, size, stride, TEMPERATURE: tl.constexpr, WIDE: tl.constexpr):
    """Logits over the temperature, -inf past the end of the row; the division is rounded as IEEE says."""
    NARROW: tl.constexpr = WIDE == tl.float32  # noqa: SIM300
    x = tl.load(ptr + column * stride, mask=column < size, other=-float("inf")).to(WIDE)
    if TEMPERATURE != 0.0 and TEMPERATURE != 1.0:
        x = tl.div_rn(x, tl.full(x.shape, TEMPERATURE, dtype=WIDE)) if NARROW else x / TEMPERATURE
    return x


@triton.jit
def _better(score, column, best, token):
    """The largest score and its token, the smallest among equals; a block that has nothing larger changes nothing."""
    top = tl.max(score, axis=0)
    first = tl.min(tl.where(score == top, column, _NOBODY), axis=0)
    larger = (top > best) & (first < _NOBODY)
    return tl.where(larger, top, best), tl.where(larger, first, token)


@triton.jit
def _added(x, peak, total):
    """The largest logit and the sum of exponentials relative to it, with some more logits."""
    larger = tl.maximum(peak, tl.max(x, axis=0))
    return larger, total * tl.exp(peak - larger) + tl.sum(tl.exp(x - larger), axis=0)


@triton.jit
def _part_kernel(
    logits_ptr, seed_ptr, counter_ptr, ids_ptr, positions_ptr, best_ptr, found_ptr, peak_ptr, total_ptr, size, share,
    logits_m, logits_v, ids_m, positions_m,
    TEMPERATURE: tl.constexpr, LOWEST: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    word = _row_word(seed_ptr, counter_ptr, ids_ptr, positions_ptr, row, ids_m, positions_m)
    logits_ptr += row * logits_m
    first = part * share
    best = tl.full([], -float("inf"), dtype=WIDE)
    token = first
    peak = tl.full([], LOWEST, dtype=WIDE)
    total = tl.full([], 0.0, dtype=WIDE)
    for start in range(first, tl.minimum(first + share, size), COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = _logits(logits_ptr, column, size, logits_v, TEMPERATURE, WIDE)
        score = x
        if TEMPERATURE != 0.0:
            score = x + _noise(word, column).to(WIDE)
        best, token = _better(score, column, best, token)
        peak, total = _added(x, peak, total)
    at = part * tl.num_programs(0) + row
    tl.store(best_ptr + at, best)
    tl.store(found_ptr + at, token)
    tl.store(peak_ptr + at, peak)
    tl.store(total_ptr + at, total)


@triton.jit
def _merge_kernel(
    logits_ptr, best_ptr, found_ptr, peak_ptr, total_ptr, tokens_ptr, logp_ptr, count, parts, logits_m, logits_v,
    PARTS: tl.constexpr,
    TEMPERATURE: tl.constexpr, LOWEST: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS).to(tl.int64)
    there = part < parts
    at = part * count + row
    best = tl.load(best_ptr + at, mask=there, other=-float("inf"))
    found = tl.load(found_ptr + at, mask=there, other=_NOBODY)
    peak = tl.load(peak_ptr + at, mask=there, other=LOWEST)
    total = tl.load(total_ptr + at, mask=there, other=0.0)
    token = tl.min(tl.where(best == tl.max(best, axis=0), found, _NOBODY), axis=0)
    largest = tl.max(peak, axis=0)
    total = tl.sum(total * tl.exp(peak - largest), axis=0)
    chosen = _logits(logits_ptr + row * logits_m, token, token + 1, logits_v, TEMPERATURE, WIDE)
    tl.store(tokens_ptr + row, token)
    tl.store(logp_ptr + row, (chosen - largest - tl.where(total == 0, 0.0, tl.log(total))).to(tl.float32))


@triton.jit
def _ordered(x, INT: tl.constexpr, BITS: tl.constexpr):
    """Integers in the order of floating numbers; -0 is 0."""
    bits = (x + 0.0).to(INT, bitcast=True)
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits).to(tl.int64)


@triton.jit
def _number(order, WIDE: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr):
    """The floating number of an integer."""
    bits = tl.where(order < 0, order ^ ((1 << (BITS - 1)) - 1), order)
    return bits.to(INT).to(WIDE, bitcast=True)


@triton.jit
def _above(
    ptr, size, stride, bound, peak, MASS: tl.constexpr,
    TEMPERATURE: tl.constexpr, WIDE: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """How many logits are at or above each of four bounds [4], or what they weigh relative to the largest."""
    found = tl.zeros([4], dtype=WIDE)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = _logits(ptr, column, size, stride, TEMPERATURE, WIDE)
        inside = (column < size)[:, None] & (_ordered(x, INT, BITS)[:, None] >= bound[None, :])
        weight = tl.exp(x - peak) if MASS else tl.full([COLUMNS], 1.0, dtype=WIDE)
        found += tl.sum(tl.where(inside, weight[:, None], 0.0), axis=0)
    return found


@triton.jit
def _bound(
    ptr, size, stride, low, high, target, peak, MASS: tl.constexpr,
    TEMPERATURE: tl.constexpr, WIDE: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest bound in [low, high) that has at least the target at or above it; `low` has."""
    number = tl.arange(0, 4).to(tl.int64)
    while low < high - 1:
        step = tl.maximum(high // 5 - low // 5, 1)  # orders of float64 lie further apart than 64 bits can tell
        bound = low + (number + 1) * step
        found = _above(ptr, size, stride, bound, peak, MASS, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        enough = (found >= target) & (bound < high)
        low = tl.max(tl.where(enough, bound, low), axis=0)
        high = tl.min(tl.where(enough | (bound > high), high, bound), axis=0)
    return low


@triton.jit
def _one(found, which: tl.constexpr):
    """One number of four."""
    return tl.sum(tl.where(tl.arange(0, 4) == which, found, 0.0), axis=0)


@triton.jit
def _ruled_kernel(
    logits_ptr, seed_ptr, counter_ptr, ids_ptr, positions_ptr, tokens_ptr, logp_ptr, kept_ptr, size, logits_m, logits_v,
    ids_m, positions_m, top_k,
    HAS_K: tl.constexpr, TOP_P: tl.constexpr, HAS_MIN: tl.constexpr, LOG_MIN: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr,
    TEMPERATURE: tl.constexpr, LOWEST: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = _row_word(seed_ptr, counter_ptr, ids_ptr, positions_ptr, row, ids_m, positions_m)
    logits_ptr += row * logits_m
    size = tl.full([], 0, dtype=tl.int64) + size  # an argument of 1 is no tensor
    top_k = tl.full([], 0, dtype=tl.int64) + top_k
    peak = tl.full([], -float("inf"), dtype=WIDE)
    broken = tl.full([], 0, dtype=tl.int32)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = _logits(logits_ptr, column, size, logits_v, TEMPERATURE, WIDE)
        broken += tl.sum((x != x).to(tl.int32), axis=0)
        peak = tl.maximum(peak, tl.max(tl.where(x == x, x, -float("inf")), axis=0))
    top = _ordered(peak, INT, BITS)
    lowest = _ordered(tl.full([], -float("inf"), dtype=WIDE), INT, BITS)
    shift = tl.maximum(peak, LOWEST)
    pair = tl.arange(0, 4).to(tl.int64)  # a bound, and the next one

    # what stays: everything above `last`, and the first `ties` of those that are equal to it
    last = lowest
    ties = size
    kept = size
    if HAS_K:
        target = top_k.to(WIDE)
        last = _bound(
            logits_ptr, size, logits_v, lowest, top + 1, target, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS
        )  # fmt: skip
        found = _above(logits_ptr, size, logits_v, last + pair, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        ties = top_k - _one(found, 1).to(tl.int64)
        kept = top_k
    if TOP_P < 1.0:
        found = _above(logits_ptr, size, logits_v, last + pair, shift, True, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        here = tl.exp(_number(last, WIDE, INT, BITS) - shift)
        whole = _one(found, 1) + ties.to(WIDE) * here if HAS_K else _one(found, 0)
        target = whole * TOP_P
        deepest = last
        last = _bound(
            logits_ptr, size, logits_v, last, top + 1, target, shift, True, TEMPERATURE, WIDE, INT, BITS, COLUMNS
        )  # fmt: skip
        mass = _above(logits_ptr, size, logits_v, last + pair, shift, True, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        number = _above(logits_ptr, size, logits_v, last + pair, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        above = _one(number, 1).to(tl.int64)
        equal = _one(number, 0).to(tl.int64) - above
        equal = tl.where(last == deepest, tl.minimum(equal, ties), equal)
        here = tl.exp(_number(last, WIDE, INT, BITS) - shift)
        some = tl.ceil((target - _one(mass, 1)) / tl.where(here > 0, here, 1.0))
        some = tl.where(here > 0, tl.minimum(tl.maximum(some, 1.0), equal.to(WIDE)), equal.to(WIDE))
        ties = some.to(tl.int64)
        kept = above + ties
    if HAS_MIN:
        least = _ordered(peak + LOG_MIN, INT, BITS)
        found = _above(logits_ptr, size, logits_v, least + pair, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        higher = least > last
        kept = tl.where(higher, _one(found, 0).to(tl.int64), kept)
        ties = tl.where(higher, size, ties)
        last = tl.maximum(least, last)

    best = tl.full([], -float("inf"), dtype=WIDE)
    token = tl.full([], 0, dtype=tl.int64)
    total = tl.full([], 0.0, dtype=WIDE)
    passed = tl.full([], 0, dtype=tl.int64)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = _logits(logits_ptr, column, size, logits_v, TEMPERATURE, WIDE)
        order = _ordered(x, INT, BITS)
        tied = ((order == last) & (column < size)).to(tl.int64)
        stays = (order > last) | ((tied > 0) & (passed + tl.cumsum(tied, axis=0) <= ties))
        passed += tl.sum(tied, axis=0)
        if tl.max(stays.to(tl.int32), axis=0) > 0:
            left = tl.where(stays, x, -float("inf"))
            total += tl.sum(tl.exp(left - shift), axis=0)
            best, token = _better(left + _noise(word, column).to(WIDE), column, best, token)
    chosen = _logits(logits_ptr, token, token + 1, logits_v, TEMPERATURE, WIDE)
    logp = chosen - shift - tl.where(total == 0, 0.0, tl.log(total))
    tl.store(tokens_ptr + row, token)
    tl.store(logp_ptr + row, tl.where(broken > 0, float("nan"), logp).to(tl.float32))
    tl.store(kept_ptr + row, kept)
