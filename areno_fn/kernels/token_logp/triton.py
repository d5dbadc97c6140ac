"""Log-probability and entropy in Triton: one pass over the vocabulary, then one elementwise pass backward.

The pass keeps the largest logit m so far, s = sum(exp(l - m)) and u = sum(exp(l - m) (m - l)), and rescales s
and u when m grows. Then log p_t = l_t - m - log(s) and H = log(s) + u / s, a sum of two terms that are not negative.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, wide

COLUMNS = 8192


def forward(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logp, entropy, largest logit, log(s), all [M]; NaN where a target is outside the vocabulary."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    count, size = logits.shape
    logp, entropy, peak, log_sum = (torch.empty(count, dtype=dtype, device=logits.device) for _ in range(4))
    if count:
        with on_device_of(logits):
            _forward_kernel[(count,)](
                logits, targets, logp, entropy, peak, log_sum, size, *logits.stride(), targets.stride(0),
                LOWEST=torch.finfo(dtype).min, WIDE=wide(logits),
                COLUMNS=min(COLUMNS, triton.next_power_of_2(size)), num_warps=8, **ROUNDING,
            )  # fmt: skip
    return logp, entropy, peak, log_sum


def backward(
    dlogp: torch.Tensor,
    dentropy: torch.Tensor | None,
    logits: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    peak: torch.Tensor,
    log_sum: torch.Tensor,
) -> torch.Tensor:
    """The cotangent of the logits, [M, V], contiguous."""
    count, size = logits.shape
    dlogits = torch.empty(count, size, dtype=logits.dtype, device=logits.device)
    columns = min(COLUMNS, triton.next_power_of_2(size))
    besides = dlogp if dentropy is None else dentropy  # not read in the first case
    if count:
        with on_device_of(logits):
            _backward_kernel[(count, triton.cdiv(size, columns))](
                dlogp, besides, logits, targets, entropy, peak, log_sum, dlogits, size, dlogp.stride(0), besides.stride(0),
                *logits.stride(), targets.stride(0), ENTROPIC=dentropy is not None, WIDE=wide(logits), COLUMNS=columns,
                num_warps=8, **ROUNDING,
            )  # fmt: skip
    return dlogits


@triton.jit
def _forward_kernel(
    logits_ptr, targets_ptr, logp_ptr, entropy_ptr, peak_ptr, log_sum_ptr, size, logits_m, logits_v, targets_m,
    LOWEST: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_m
    m = tl.full([], LOWEST, dtype=WIDE)
    s = tl.full([], 0.0, dtype=WIDE)
    u = tl.full([], 0.0, dtype=WIDE)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        logit = tl.load(logits_ptr + column * logits_v, mask=column < size, other=-float("inf")).to(WIDE)
        larger = tl.maximum(m, tl.max(logit, axis=0))
        growth = tl.where(s > 0, larger - m, 0.0)
        shrink = tl.exp(-growth)
        u = tl.where(shrink > 0, shrink * (u + growth * s), 0.0)
        s *= shrink
        e = tl.exp(logit - larger)
        s += tl.sum(e, axis=0)
        # exp may be 0 where the distance is infinite
        u += tl.sum(tl.where(e > 0, e * (larger - logit), 0.0), axis=0)
        m = larger
    log_sum = tl.where(s == 0, 0.0, tl.log(s))
    target = tl.load(targets_ptr + row * targets_m)
    known = (target >= 0) & (target < size)
    chosen = tl.load(logits_ptr + target * logits_v, mask=known, other=float("nan")).to(WIDE)
    tl.store(logp_ptr + row, chosen - m - log_sum)
    tl.store(entropy_ptr + row, tl.where(s == 0, 0.0, log_sum + u / s))
    tl.store(peak_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _backward_kernel(
    dlogp_ptr, dentropy_ptr, logits_ptr, targets_ptr, entropy_ptr, peak_ptr, log_sum_ptr, dlogits_ptr, size, dlogp_m,
    dentropy_m, logits_m, logits_v, targets_m, ENTROPIC: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    dlogp = tl.load(dlogp_ptr + row * dlogp_m).to(WIDE)
    target = tl.load(targets_ptr + row * targets_m)
    peak = tl.load(peak_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    logit = tl.load(logits_ptr + row * logits_m + column * logits_v, mask=inside, other=0.0).to(WIDE)
    logp = logit - peak - log_sum
    probability = tl.exp(logp)
    dlogit = dlogp * (tl.where(column == target, 1.0, 0.0) - probability)
    if ENTROPIC:
        dentropy = tl.load(dentropy_ptr + row * dentropy_m).to(WIDE)
        dlogit -= dentropy * probability * (logp + tl.load(entropy_ptr + row))
    dlogit = tl.where(logit == -float("inf"), 0.0, dlogit)
    tl.store(dlogits_ptr + row * size + column, dlogit.to(dlogits_ptr.dtype.element_ty), mask=inside)
