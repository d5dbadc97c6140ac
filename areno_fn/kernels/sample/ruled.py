"""Drawing among the tokens that rules leave: the smallest logit that stays is searched, then one of what is left is drawn.

What can stay is collected first: the peaks of blocks, or their mass, say how small a logit may be at least. As a rule this
leaves some thousands, which a program then goes through as often as it must; where they are more than `room`, as when a
distribution is flat, it goes through the whole row instead. Either way logits are compared as integers that are ordered
like them, and the search counts, or adds up, what lies above four bounds at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from areno_fn.kernels.sample.numbers import better, noise, number, ordered, row_word, scaled

_DEEPER = tl.constexpr(0.7)  # how much less than its mass says a logit may be, so that roundings cut nothing off


@triton.jit
def _above(
    ptr, size, stride, bound, step, peak, MASS: tl.constexpr,
    TEMPERATURE: tl.constexpr, WIDE: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """How many logits are at or above each of four bounds, `step` apart, or what they weigh relative to the largest."""
    a = tl.zeros([COLUMNS], dtype=WIDE)
    b = tl.zeros([COLUMNS], dtype=WIDE)
    c = tl.zeros([COLUMNS], dtype=WIDE)
    d = tl.zeros([COLUMNS], dtype=WIDE)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = scaled(ptr, column, size, stride, TEMPERATURE, WIDE)
        order = ordered(x, INT, BITS)
        weight = tl.exp(x - peak) if MASS else tl.full([COLUMNS], 1.0, dtype=WIDE)
        weight = tl.where(column < size, weight, 0.0)
        a += tl.where(order >= bound, weight, 0.0)
        b += tl.where(order >= bound + step, weight, 0.0)
        c += tl.where(order >= bound + 2 * step, weight, 0.0)
        d += tl.where(order >= bound + 3 * step, weight, 0.0)
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0), tl.sum(d, axis=0)


@triton.jit
def _nearer(low, high, bound, found, target):
    """An interval with one bound less in it, if the bound lies in it."""
    inside = bound < high
    enough = found >= target
    return tl.where(inside & enough, bound, low), tl.where(inside & (enough == 0), bound, high)


@triton.jit
def _bound(
    ptr, size, stride, low, high, target, peak, MASS: tl.constexpr,
    TEMPERATURE: tl.constexpr, WIDE: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest bound in [low, high) that has at least the target at or above it; `low` has."""
    while low < high - 1:
        step = tl.maximum(high // 5 - low // 5, 1)  # orders lie further apart than their integers can tell
        first = low + step
        a, b, c, d = _above(ptr, size, stride, first, step, peak, MASS, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        low, high = _nearer(low, high, first, a, target)
        low, high = _nearer(low, high, first + step, b, target)
        low, high = _nearer(low, high, first + 2 * step, c, target)
        low, high = _nearer(low, high, first + 3 * step, d, target)
    return low


@triton.jit
def _left(
    ptr, tokens_ptr, size, stride, lowest, peak, shift, mass, top_k, word,
    COLLECTED: tl.constexpr, HAS_K: tl.constexpr, TOP_P: tl.constexpr, HAS_MIN: tl.constexpr, LOG_MIN: tl.constexpr,
    INT: tl.constexpr, BITS: tl.constexpr, TEMPERATURE: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draws one of the logits that stay: its token, itself, the mass of all that stay and how many they are.

    Args:
        tokens_ptr: of each logit, where they are `COLLECTED`; otherwise a logit's token is its place.
        lowest: a bound that all logits are at or above.
        peak, shift: the largest logit, and what exponentials are relative to.
        mass: of the whole row.
    """
    top = ordered(peak, INT, BITS)
    # what stays: everything above `last`, and the first `ties` of those that are equal to it
    last = lowest
    ties = size
    kept = size
    if HAS_K:
        last = _bound(
            ptr, size, stride, lowest, top + 1, top_k.to(WIDE), shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS
        )  # fmt: skip
        _, above, _, _ = _above(ptr, size, stride, last, 1, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        ties = top_k - above.to(tl.int64)
        kept = top_k
    if TOP_P < 1.0:
        deepest = last
        if HAS_K:
            _, above, _, _ = _above(ptr, size, stride, last, 1, shift, True, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
            mass = above + ties.to(WIDE) * tl.exp(number(last, WIDE, INT, BITS) - shift)
        target = mass * TOP_P
        last = _bound(ptr, size, stride, last, top + 1, target, shift, True, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        _, weighed, _, _ = _above(ptr, size, stride, last, 1, shift, True, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        here, there, _, _ = _above(ptr, size, stride, last, 1, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        count = there.to(tl.int64)
        equal = here.to(tl.int64) - count
        equal = tl.where(last == deepest, tl.minimum(equal, ties), equal)
        each = tl.exp(number(last, WIDE, INT, BITS) - shift)
        some = tl.ceil((target - weighed) / tl.where(each > 0, each, 1.0))
        some = tl.where(each > 0, tl.minimum(tl.maximum(some, 1.0), equal.to(WIDE)), equal.to(WIDE))
        ties = some.to(tl.int64)
        kept = count + ties
    if HAS_MIN:
        least = ordered(peak + LOG_MIN, INT, BITS)
        found, _, _, _ = _above(ptr, size, stride, least, 1, shift, False, TEMPERATURE, WIDE, INT, BITS, COLUMNS)
        higher = least > last
        kept = tl.where(higher, found.to(tl.int64), kept)
        ties = tl.where(higher, size, ties)
        last = tl.maximum(least, last)

    best = tl.full([], -float("inf"), dtype=WIDE)
    token = tl.full([], 0, dtype=tl.int64)
    place = tl.full([], 0, dtype=tl.int64)
    total = tl.full([], 0.0, dtype=WIDE)
    passed = tl.full([], 0, dtype=tl.int64)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = scaled(ptr, column, size, stride, TEMPERATURE, WIDE)
        order = ordered(x, INT, BITS)
        tied = ((order == last) & (column < size)).to(tl.int64)
        stays = (order > last) | ((tied > 0) & (passed + tl.cumsum(tied, axis=0) <= ties))
        passed += tl.sum(tied, axis=0)
        if tl.max(stays.to(tl.int32), axis=0) > 0:
            left = tl.where(stays, x, -float("inf"))
            total += tl.sum(tl.exp(left - shift), axis=0)
            name = column
            if COLLECTED:
                name = tl.load(tokens_ptr + column, mask=column < size, other=0).to(tl.int64)
            score = left + noise(word, name).to(WIDE)
            before = best
            best, token = better(score, name, best, token)
            first = tl.min(tl.where(name == token, column, size), axis=0)
            place = tl.where(best > before, first, place)
    logit = scaled(ptr, place, place + 1, stride, TEMPERATURE, WIDE)
    return token, logit, total, kept


@triton.jit
def _collect(
    ptr, size, stride, least, peaks_ptr, blocks, logits_ptr, tokens_ptr, room,
    TEMPERATURE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies logits that are not below `least`, in their order, and says how many there are; those beyond `room` are lost."""
    count = tl.full([], 0, dtype=tl.int64)
    for start in range(0, size, COLUMNS):
        block = start // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        peak = tl.load(peaks_ptr + block, mask=block < blocks, other=-float("inf"))
        if tl.max(peak, axis=0) >= least:
            column = start + tl.arange(0, COLUMNS).to(tl.int64)
            x = scaled(ptr, column, size, stride, TEMPERATURE, WIDE)
            stays = (column < size) & (x >= least)
            place = count + tl.cumsum(stays.to(tl.int32), axis=0) - 1
            tl.store(logits_ptr + place, x, mask=stays & (place < room))
            tl.store(tokens_ptr + place, column.to(tl.int32), mask=stays & (place < room))
            count += tl.sum(stays.to(tl.int32), axis=0)
    tl.debug_barrier()  # one thread reads what another has written
    return count


@triton.jit
def ruled_kernel(
    logits_ptr, seed_ptr, counter_ptr, ids_ptr, positions_ptr, peak_ptr, total_ptr, some_ptr, names_ptr,
    tokens_ptr, logp_ptr, kept_ptr, size, blocks, room, logits_m, logits_v, ids_m, positions_m, top_k,
    HAS_K: tl.constexpr, TOP_P: tl.constexpr, HAS_MIN: tl.constexpr, LOG_MIN: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr,
    TEMPERATURE: tl.constexpr, LOWEST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draws a token of a row among those that stay."""
    row = tl.program_id(0).to(tl.int64)
    word = row_word(seed_ptr, counter_ptr, ids_ptr, positions_ptr, row, ids_m, positions_m)
    logits_ptr += row * logits_m
    peak_ptr += row * blocks
    some_ptr += row * room
    names_ptr += row * room
    size = tl.full([], 0, dtype=tl.int64) + size  # an argument of 1 is no tensor
    top_k = tl.full([], 0, dtype=tl.int64) + top_k
    block = tl.arange(0, EVERY)
    there = block < blocks
    peaks = tl.load(peak_ptr + block, mask=there, other=LOWEST)
    totals = tl.load(total_ptr + row * blocks + block, mask=there, other=0.0)
    peak = tl.max(peaks, axis=0)
    mass = tl.sum(totals * tl.exp(peaks - peak), axis=0)
    broken = mass != mass
    # the least that a logit which stays can be
    least = tl.full([], -float("inf"), dtype=WIDE)
    if HAS_K:
        if top_k <= blocks:  # as many blocks have a peak that is no smaller
            orders = ordered(peaks, INT, BITS)
            low = ordered(tl.full([], LOWEST, dtype=WIDE), INT, BITS)
            high = ordered(peak, INT, BITS) + 1
            while low < high - 1:
                middle = low + tl.maximum(high // 2 - low // 2, 1)
                enough = tl.sum((there & (orders >= middle)).to(tl.int32), axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            least = number(low, WIDE, INT, BITS)
    elif TOP_P < 1.0:  # all that are smaller weigh less together than what may be cut off
        least = peak + tl.log((1.0 - TOP_P) * mass / size) - _DEEPER
    else:
        least = peak + LOG_MIN
    least = tl.where(broken, -float("inf"), least)
    count = _collect(
        logits_ptr,
        size,
        logits_v,
        least,
        peak_ptr,
        blocks,
        some_ptr,
        names_ptr,
        room,
        TEMPERATURE,
        WIDE,
        BLOCK,
        COLUMNS,
    )
    if count <= room:
        lowest = ordered(least, INT, BITS)
        token, logit, total, kept = _left(
            some_ptr, names_ptr, count, 1, lowest, peak, peak, mass, top_k, word,
            True, HAS_K, TOP_P, HAS_MIN, LOG_MIN, INT, BITS, 1.0, WIDE, COLUMNS,
        )  # fmt: skip
    else:
        lowest = ordered(tl.full([], -float("inf"), dtype=WIDE), INT, BITS)
        token, logit, total, kept = _left(
            logits_ptr, names_ptr, size, logits_v, lowest, peak, peak, mass, top_k, word,
            False, HAS_K, TOP_P, HAS_MIN, LOG_MIN, INT, BITS, TEMPERATURE, WIDE, COLUMNS,
        )  # fmt: skip
    # of a row that is -inf throughout nothing stays, and what was read as its logit is not one
    logp = tl.where(mass == 0, -float("inf"), logit - peak - tl.where(total == 0, 0.0, tl.log(total)))
    tl.store(tokens_ptr + row, tl.where(mass == 0, 0, token))
    tl.store(logp_ptr + row, tl.where(broken, float("nan"), logp).to(tl.float32))
    tl.store(kept_ptr + row, tl.maximum(kept, 1))
