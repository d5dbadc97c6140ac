"""Exponentials of logits, which the product that makes the logits writes in their place, and what is known of each row.

With e_ij = exp(l_ij - a_i) for any a_i, and Z_i the sum of a row, the gradient of a loss of slopes s_i is

    dhidden_i = s_i (weight_t - (e weight)_i / Z_i),    dweight = sum over i of (1[j = t] - e_ij / Z_i) s_i hidden_i:

Z_i is a factor of rows of the one product and of the other's second matrix, so that `e` can be written before Z is known, and
no pass over the logits is left. In the column of its target a row holds minus the sum of all others, which is e - Z there.

All is in powers of 2. A row begins at the logit of its target, less a constant, since log Z is not below it. One whose
largest logit lies so far above that its powers would leave the range, is made again from that one, with all rows made at
once. Powers are summed before they are rounded to bfloat16, whose range is that of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from areno_fn.kernels.launch import on_device_of, resident
from areno_fn.kernels.ordered_linear.triton import Tile, corner, even

BASE = 1.4426950408889634
"""What makes powers of 2 of exponentials: those are one instruction."""
BEGIN = -32.0
"""The power of 2 that a target has. One 94 below it is still a number, and adds nothing."""
FARTHEST = 64.0
"""The largest power of 2 that stays: sums of those, and gradients over them, are numbers."""
CANCELS = 128.0
"""How much smaller than a sum what is left of it may be: about the root of the ratio of both roundings."""
MADE = Tile(128, 256, 64, 8, 3)
_GROUP = 8  # tiles of rows that are made side by side, so that they find the weight in the cache


def takes(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether matrices have the range that powers need, and rows that descriptors can stand for."""
    return hidden.dtype == torch.bfloat16 and even(hidden) and even(weight)


class Parts(NamedTuple):
    """What is known of rows that are made at once, tile by tile.

    Attributes:
        sums: float32 [3, tiles, rows]: the largest power of a row in a tile, and the sums of 2^power and 2^power power.
        far: int32 [1], 1 when a row lies out of range.
    """

    sums: torch.Tensor
    far: torch.Tensor


def parts_of(rows: int, size: int, device: torch.device) -> Parts:
    """Memory for so many rows over a vocabulary of that size."""
    sums = torch.empty(3, triton.cdiv(size, MADE.columns), rows, dtype=torch.float32, device=device)
    return Parts(sums, torch.empty(1, dtype=torch.int32, device=device))


def write(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    logp: torch.Tensor,
    entropy: torch.Tensor,
    out: torch.Tensor,
    parts: Parts,
    scale: float,
) -> torch.Tensor:
    """Writes logp and entropy [R] of rows, and Z (p_j - 1[j = target]) [R, V] for the Z [R] that it returns."""
    (count, width), size = hidden.shape, weight.shape[0]
    anchor, begin, total = (torch.empty_like(logp) for _ in range(3))
    sums, factor = parts.sums[:, :, :count], scale * BASE
    boxes = ((hidden, MADE.rows, MADE.depth), (weight, MADE.columns, MADE.depth), (out, MADE.rows, MADE.columns // 2))
    described = [TensorDescriptor.from_tensor(matrix, [tall, wide]) for matrix, tall, wide in boxes]
    tiles = triton.cdiv(count, MADE.rows) * sums.shape[1]
    programs = min(tiles, resident(hidden, MADE.warps, MADE.warps))
    wide = triton.next_power_of_2(sums.shape[1])
    parts.far.zero_()
    with on_device_of(hidden):
        _anchor_kernel[(count,)](
            hidden, weight, targets, anchor, begin, width, size, hidden.stride(0), weight.stride(0), targets.stride(0),
            factor, BEGIN=BEGIN, COLUMNS=min(4096, triton.next_power_of_2(width)), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
        for again in (False, True):
            _powers_kernel[(programs,)](
                *described, begin, parts.far, sums, count, size, width, sums.stride(0), sums.stride(1), factor,
                AGAIN=again, ROWS=MADE.rows, COLUMNS=MADE.columns, DEPTH=MADE.depth, GROUP=_GROUP, NARROW=hidden.is_cuda,
                num_warps=MADE.warps, num_stages=MADE.stages, enable_fp_fusion=True,
            )  # fmt: skip
            if not again:
                _range_kernel[(count,)](
                    sums, begin, parts.far, sums.shape[1], sums.stride(1), FARTHEST=FARTHEST, TILES=wide, num_warps=4,
                    enable_fp_fusion=True,
                )  # fmt: skip
        _close_kernel[(count,)](
            sums, anchor, begin, targets, out, logp, entropy, total, size, sums.shape[1], sums.stride(0), sums.stride(1),
            out.stride(0), targets.stride(0), TILES=wide, COLUMNS=MADE.columns, CANCELS=CANCELS, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return total


@triton.jit
def _anchor_kernel(
    x_ptr, w_ptr, targets_ptr, anchor_ptr, begin_ptr, width, size, x_m, w_m, targets_m, factor,
    BEGIN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The logit of each target, and the one at which its row begins."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row * targets_m)
    target = tl.where((target >= 0) & (target < size), target, 0)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * x_m + column, mask=column < width, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + target * w_m + column, mask=column < width, other=0.0).to(tl.float32)
    anchor = tl.sum(total) * factor
    tl.store(anchor_ptr + row, anchor)
    tl.store(begin_ptr + row, anchor - BEGIN)


@triton.jit
def _half(e_box, row, column, logit, begin, size, factor, COLUMNS: tl.constexpr):
    """Writes powers of half a tile; their largest and their sums in each row."""
    power = logit * factor - begin[:, None]
    if column + COLUMNS > size:
        power = tl.where((column + tl.arange(0, COLUMNS) < size)[None, :], power, -1000.0)
    largest = tl.max(power, axis=1)
    power = tl.minimum(power, 126.0)
    e = tl.exp2(power)
    e_box.store([row, column], e.to(e_box.dtype))
    return largest, tl.sum(e, axis=1), tl.sum(e * power, axis=1)


@triton.jit(do_not_specialize=["count"])
def _powers_kernel(
    x_box, w_box, e_box, begin_ptr, far_ptr, sums_ptr, count, size, width, sums_k, sums_t, factor,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    # the interpreter would multiply the bits of bfloat16 as if they were integers
    EXACT: tl.constexpr = x_box.dtype if NARROW else tl.float32
    HALF: tl.constexpr = COLUMNS // 2
    tiles = tl.cdiv(count, ROWS) * tl.cdiv(size, COLUMNS)
    if AGAIN:
        tiles *= tl.load(far_ptr)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first, column = corner(number, count, size, ROWS, COLUMNS, GROUP)
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, width, DEPTH):
            x = x_box.load([first, start])
            w = w_box.load([column, start])
            total = tl.dot(x.to(EXACT), tl.trans(w.to(EXACT)), total, input_precision="ieee")
        row = first + tl.arange(0, ROWS)
        inside = row < count
        begin = tl.load(begin_ptr + row, mask=inside, other=0.0)
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
        m0, s0, u0 = _half(e_box, first, column, left, begin, size, factor, HALF)
        m1, s1, u1 = _half(e_box, first, column + HALF, right, begin, size, factor, HALF)
        at = sums_ptr + column // COLUMNS * sums_t + row
        tl.store(at, tl.maximum(m0, m1), mask=inside)
        tl.store(at + sums_k, s0 + s1, mask=inside)
        tl.store(at + 2 * sums_k, u0 + u1, mask=inside)


@triton.jit
def _range_kernel(sums_ptr, begin_ptr, far_ptr, tiles, sums_t, FARTHEST: tl.constexpr, TILES: tl.constexpr):
    """Lets rows begin at their largest logit, whose powers left the range."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    largest = tl.max(tl.load(sums_ptr + tile * sums_t + row, mask=tile < tiles, other=-1000.0))
    if largest > FARTHEST:
        tl.store(begin_ptr + row, tl.load(begin_ptr + row) + largest)
        tl.store(far_ptr, 1)


@triton.jit
def _close_kernel(
    sums_ptr, anchor_ptr, begin_ptr, targets_ptr, e_ptr, logp_ptr, entropy_ptr, total_ptr, size, tiles, sums_k, sums_t, e_m,
    targets_m, TILES: tl.constexpr, COLUMNS: tl.constexpr, CANCELS: tl.constexpr,
):  # fmt: skip
    """Sums rows, and sets what stands in the column of the target."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row * targets_m)
    known = (target >= 0) & (target < size)
    power = tl.load(anchor_ptr + row) - tl.load(begin_ptr + row)
    chosen = tl.where(known, tl.exp2(power), 0.0)
    # the sums of all but the target, whose own tile lies apart
    here = tl.where(known, target // COLUMNS, tiles)
    tile = tl.arange(0, TILES)
    at = sums_ptr + tile * sums_t + row
    apart = (tile < tiles) & (tile != here)
    others = tl.sum(tl.load(at + sums_k, mask=apart, other=0.0))
    u = tl.sum(tl.load(at + 2 * sums_k, mask=apart, other=0.0))
    # of that the target is taken off, or, where this would cancel, the rounded powers are summed again
    at = sums_ptr + here * sums_t + row
    sum_here = tl.load(at + sums_k, mask=known, other=0.0)
    u_here = tl.load(at + 2 * sums_k, mask=known, other=0.0)
    column = here * COLUMNS + tl.arange(0, COLUMNS)
    e = tl.load(e_ptr + row * e_m + column, mask=(column < size) & (column != target), other=0.0).to(tl.float32)
    beside = tl.sum(e)
    cancels = beside * CANCELS < sum_here
    others += tl.where(cancels, beside, sum_here - chosen)
    u += tl.where(cancels, tl.sum(tl.where(e > 0, e * tl.log2(tl.where(e > 0, e, 1.0)), 0.0)), u_here - chosen * power)
    total = others + chosen
    log_sum = tl.log2(total)
    tl.store(logp_ptr + row, tl.where(known, power - log_sum, float("nan")) * 0.6931471805599453)
    tl.store(entropy_ptr + row, (log_sum - (u + chosen * power) / total) * 0.6931471805599453)
    tl.store(total_ptr + row, total)
    tl.debug_barrier()  # others read what is written
    tl.store(e_ptr + row * e_m + target, (-others).to(e_ptr.dtype.element_ty), mask=known)
