"""Log-probabilities of a linear head and their gradients on the GPU: three products, some rows of logits at a time.

In bfloat16 the first product writes exponentials in the place of logits (`powers.py`); the others are cuBLAS's. In other dtypes
logits are made over the whole vocabulary and turned in place into 1[j = target] - p_j: a program reads a row twice, the second
time from the cache, because those that run at once read no more than it holds. For a loss of entropies, whose cotangent is no
multiple of that, two passes are made as `linear_token_logp` makes them, the slopes in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, Steps, on_device_of, resident, tile, warps, wide
from areno_fn.kernels.linear_token_logp.triton import ABSENT, measure, pull, put_product
from areno_fn.kernels.linear_token_loss import powers
from areno_fn.kernels.linear_token_loss.powers import BASE
from areno_fn.kernels.linear_token_loss.scored import Linear, Scored, Slope, both, pulled

EVEN = 64
"""Rows of logits begin at multiples of so many elements, so that loads are wide whatever the vocabulary."""


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slope: Slope,
    scale: float,
    scored: Scored | None,
    linear: Linear | None,
    rows: int,
    into_weight: bool,
    entropic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A 0, logp and entropy [M], and the gradients [M, D] and [V, D] (empty where not wanted), contiguous."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    (count, width), size = hidden.shape, weight.shape[0]
    logp, entropy = (torch.empty(count, dtype=dtype, device=hidden.device) for _ in range(2))
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    total = torch.empty(weight.shape if into_weight else (0, width), dtype=dtype, device=hidden.device)
    rows = min(rows, count)
    kept = rows if linear is None else 0
    scratch = torch.empty(kept, size + -size % EVEN, dtype=hidden.dtype, device=hidden.device)
    hidden = hidden.contiguous()
    if not count:
        total.zero_()
    powered = scored is None and not entropic and powers.takes(hidden, weight)
    parts = powers.parts_of(rows if powered else 0, size, hidden.device)
    with on_device_of(hidden):
        for first in range(0, count, max(rows, 1)):
            here = slice(first, first + rows)
            part = hidden[here]
            logits = scratch[: part.shape[0], :size]
            if linear:
                logits = linear(part, weight)
            elif not powered:
                torch.mm(part, weight.t(), out=logits)
            if scored is None and entropic:
                logp[here], entropy[here], peak, log_sum = measure(logits, targets[here], scale)
                dlogp, dentropy = (x.to(dtype) for x in slope(first, logp[here], entropy[here]))
                pull(logits, dlogp, dentropy, targets[here], entropy[here], peak, log_sum, scale)
                dhidden[here] = product(logits, weight, dtype)
            elif scored is None:
                known = (targets[here], logp[here], entropy[here], logits)
                times: torch.Tensor | float
                times = -scale / powers.write(part, weight, *known, parts, scale) if powered else turn(*known, scale)
                factor = both(slope(first, logp[here], entropy[here]))[0].to(dtype) * times
                scaled(product(logits, weight, dtype), factor, dhidden[here])
                part = scaled(part, factor, torch.empty_like(part))
            else:
                logp[here], entropy[here], logits = pulled(scored, slope, first, logits)
                dhidden[here] = product(logits, weight, dtype)
            if into_weight:
                put_product(total, logits.t(), part, more=first > 0)
    return hidden.new_zeros((), dtype=dtype), logp, entropy, dhidden, total


def turn(targets: torch.Tensor, logp: torch.Tensor, entropy: torch.Tensor, logits: torch.Tensor, scale: float) -> float:
    """Writes logp and entropy of rows, and 1[j = target] - p_j over the logits, in place; returns the scale."""
    count, size = logits.shape
    step = walk(size)
    _turn_kernel[(min(count, resident(logits, step.warps, step.held)),)](
        logits, targets, logp, entropy, count, size, size + -size % EVEN, logits.stride(0), targets.stride(0),
        FACTOR=abs(scale) * BASE, TURNED=scale < 0, LOWEST=torch.finfo(logp.dtype).min, ABSENT=ABSENT, WIDE=wide(logits),
        COLUMNS=min(step.rows, triton.next_power_of_2(size)), STAGES=step.stages, num_warps=step.warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return scale


def walk(size: int) -> Steps:
    """The steps along a row, whose rows are columns here."""
    del size
    return Steps(rows=8192, warps=16, stages=3, held=32)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of [R, V] and [V, D] in a wider dtype, not rounded first where cuBLAS can do that."""
    if a.dtype == dtype:
        return a @ b
    if not a.is_cuda:
        return a.to(dtype) @ b.to(dtype)
    return torch.mm(a, b, out_dtype=dtype)


def scaled(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes rows times their factors, [] or [M], rounded once; torch's own product is slow where dtypes differ."""
    count, size = x.shape
    rows, columns = tile(size)
    if x.numel():
        with on_device_of(x):
            _scaled_kernel[(triton.cdiv(count, rows),)](
                x, factor, out, count, size, x.stride(0), out.stride(0), factor.stride(0) if factor.ndim else 0,
                ROWS=rows, COLUMNS=columns, WHOLE=columns == size, num_warps=warps(rows * columns), **ROUNDING,
            )  # fmt: skip
    return out


@triton.jit
def _scaled_kernel(
    x_ptr, factor_ptr, out_ptr, count, size, x_m, out_m, factor_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] if WHOLE else (row < count)[:, None] & (column < size)[None, :]
    factor = tl.load(factor_ptr + row * factor_m, mask=row < count, other=0.0)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * x_m + column[None, :], mask=inside, other=0.0)
    y = x.to(factor.dtype) * factor[:, None]
    tl.store(out_ptr + row[:, None].to(tl.int64) * out_m + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(
    logits_ptr, targets_ptr, logp_ptr, entropy_ptr, count, size, padded, stride, targets_m,
    FACTOR: tl.constexpr, TURNED: tl.constexpr, LOWEST: tl.constexpr, ABSENT: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = logits_ptr.dtype.element_ty
    ROUNDED: tl.constexpr = NARROW != WIDE  # one instruction less, where logits are rounded by more than it costs
    LEFT: tl.constexpr = COLUMNS // 8 if COLUMNS >= 8 else 1
    whole = size // COLUMNS * COLUMNS
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.full([], 0, dtype=tl.int64) + number
        row_ptr = logits_ptr + row * stride
        target = tl.load(targets_ptr + row * targets_m)
        known = (target >= 0) & (target < size)
        chosen = tl.load(row_ptr + target, mask=known, other=float("nan")).to(WIDE)
        # what is behind the last whole block comes first
        column = whole + tl.arange(0, COLUMNS)
        tail = tl.load(row_ptr + column, mask=column < padded, other=0.0).to(WIDE)
        if TURNED:
            chosen = -chosen
            tail = -tail
        tail = tl.where(column < size, tail, ABSENT)
        m = tl.maximum(tl.max(tail, axis=0), LOWEST)
        distance = (m - tail) * FACTOR
        e = tl.exp2(-distance)
        s = tl.sum(tl.reshape(e, [LEFT, COLUMNS // LEFT]), axis=1)  # sums stay with the threads until the row is over
        u = tl.sum(tl.reshape(e * distance, [LEFT, COLUMNS // LEFT]), axis=1)
        for start in tl.range(0, whole, COLUMNS, num_stages=STAGES):
            logit = tl.load(row_ptr + start + tl.arange(0, COLUMNS)).to(WIDE)
            if TURNED:
                logit = -logit
            larger = tl.maximum(m, tl.max(logit, axis=0))
            growth = tl.minimum((larger - m) * FACTOR, 1000.0)  # what was absent has no weight, however far it is
            shrink = tl.exp2(-growth)
            distance = larger * FACTOR - logit * FACTOR if ROUNDED else (larger - logit) * FACTOR
            e = tl.exp2(-distance)
            u = shrink * (u + growth * s) + tl.sum(tl.reshape(e * distance, [LEFT, COLUMNS // LEFT]), axis=1)
            s = s * shrink + tl.sum(tl.reshape(e, [LEFT, COLUMNS // LEFT]), axis=1)
            m = larger
        all_s = tl.sum(s, axis=0)
        log_sum = tl.log2(all_s)
        logp = ((chosen - m) * FACTOR - log_sum) * 0.6931471805599453
        tl.store(logp_ptr + row, logp)
        tl.store(entropy_ptr + row, (log_sum + tl.sum(u, axis=0) / all_s) * 0.6931471805599453)
        shift = m * FACTOR + log_sum
        # backwards, because what was read last is the likeliest to be in the cache still
        for start in tl.range(0, whole, COLUMNS, num_stages=STAGES):
            at = row_ptr + (whole - COLUMNS - start) + tl.arange(0, COLUMNS)
            logit = tl.load(at).to(WIDE)
            if TURNED:
                logit = -logit
            power = logit * FACTOR - shift if ROUNDED else (logit - m) * FACTOR - log_sum
            tl.store(at, (-tl.exp2(power)).to(NARROW))
        again = tl.load(row_ptr + column, mask=column < padded, other=0.0).to(WIDE)  # it would fill the registers
        if TURNED:
            again = -again
        tl.store(row_ptr + column, (-tl.exp2((again - m) * FACTOR - log_sum)).to(NARROW), mask=column < size)
        tl.debug_barrier()  # the target is written twice
        tl.store(row_ptr + target, (1 - tl.exp(logp)).to(NARROW), mask=known)
