"""The head and its log-probabilities on the GPU: products by cuBLAS, one pass over each part of the logits by Triton.

The forward keeps for every row the largest logit m so far, s = sum(exp(l - m)) and u = sum(exp(l - m) (m - l)), as
`token_logp` does. The backward makes a part of the logits again and turns it into its own cotangent in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, wide

COLUMNS = 8192
ABSENT = -1e30
"""A logit that no model has, and whose distance from any other is finite."""


def forward(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logp, entropy, largest logit and log(s), all [M]; NaN where a target is outside the vocabulary."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    count, size = targets.shape[0], weight.shape[0]
    logp, entropy, peak, log_sum = (torch.empty(count, dtype=dtype, device=hidden.device) for _ in range(4))
    if count:
        hidden = hidden.contiguous()
        s, u, chosen = (torch.empty(count, dtype=dtype, device=hidden.device) for _ in range(3))
        scratch = _scratch(hidden, size, columns)
        with on_device_of(hidden):
            for first in range(0, size, columns):
                logits = _logits(hidden, weight[first : first + columns], scratch)
                _forward_kernel[(count,)](
                    logits, targets, logp, entropy, peak, log_sum, s, u, chosen, logits.shape[1], first, size,
                    logits.stride(0), targets.stride(0), SCALE=scale, BEGIN=first == 0, END=first + columns >= size,
                    LOWEST=torch.finfo(dtype).min, ABSENT=ABSENT, WIDE=wide(hidden),
                    COLUMNS=min(COLUMNS, triton.next_power_of_2(logits.shape[1])), num_warps=8, **ROUNDING,
                )  # fmt: skip
    return logp, entropy, peak, log_sum


def measure(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Logp, entropy, largest logit and log(s), all [M], of rows of whole logits, whose elements lie side by side."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    count, size = logits.shape
    logp, entropy, peak, log_sum = (torch.empty(count, dtype=dtype, device=logits.device) for _ in range(4))
    _forward_kernel[(count,)](
        logits, targets, logp, entropy, peak, log_sum, peak, peak, peak, size, 0, size, logits.stride(0), targets.stride(0),
        SCALE=scale, BEGIN=True, END=True, LOWEST=torch.finfo(dtype).min, ABSENT=ABSENT, WIDE=wide(logits),
        COLUMNS=min(COLUMNS, triton.next_power_of_2(size)), num_warps=8, **ROUNDING,
    )  # fmt: skip
    return logp, entropy, peak, log_sum


def pull(
    logits: torch.Tensor,
    dlogp: torch.Tensor,
    dentropy: torch.Tensor | None,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    peak: torch.Tensor,
    log_sum: torch.Tensor,
    scale: float,
    first: int = 0,
) -> None:
    """Turns rows of logits into their cotangents in place; they are those of the tokens from `first` on."""
    count, width = logits.shape
    block = min(COLUMNS, triton.next_power_of_2(width))
    besides = dlogp if dentropy is None else dentropy  # not read in the first case
    _backward_kernel[(count, triton.cdiv(width, block))](
        dlogp, besides, logits, targets, entropy, peak, log_sum, width, first, dlogp.stride(0), besides.stride(0),
        logits.stride(0), targets.stride(0), SCALE=scale, ENTROPIC=dentropy is not None, WIDE=wide(logits), COLUMNS=block,
        num_warps=8, **ROUNDING,
    )  # fmt: skip


def backward(
    dlogp: torch.Tensor,
    dentropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    columns: int,
    entropy: torch.Tensor,
    peak: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cotangents of hidden [M, D] and weight [V, D], contiguous."""
    count, size = targets.shape[0], weight.shape[0]
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if not count:
        return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device), dweight.zero_()
    hidden = hidden.contiguous()
    dhidden = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    scratch = _scratch(hidden, size, columns)
    with on_device_of(hidden):
        for first in range(0, size, columns):
            part = weight[first : first + columns]
            logits = _logits(hidden, part, scratch)
            pull(logits, dlogp, dentropy, targets, entropy, peak, log_sum, scale, first)
            torch.mm(logits.t(), hidden, out=dweight[first : first + columns])
            put_product(dhidden, logits, part, more=True)
    return dhidden.to(hidden.dtype), dweight


def _scratch(hidden: torch.Tensor, size: int, columns: int) -> torch.Tensor:
    return torch.empty(hidden.shape[0] * min(size, columns), dtype=hidden.dtype, device=hidden.device)


def _logits(hidden: torch.Tensor, part: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The logits of a part, contiguous, in the memory of `scratch`."""
    logits = scratch[: hidden.shape[0] * part.shape[0]].view(hidden.shape[0], part.shape[0])
    return torch.mm(hidden, part.t(), out=logits)


def put_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, more: bool) -> None:
    """Writes the product of two matrices to a wider one, or adds it, without rounding it first where cuBLAS can do that."""
    if a.dtype != total.dtype and a.is_cuda:
        if more:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
        else:
            torch.ops.aten.mm.dtype_out(a, b, total.dtype, out=total)
    else:
        a, b = a.to(total.dtype), b.to(total.dtype)
        torch.addmm(total, a, b, beta=1 if more else 0, out=total)


@triton.jit
def _forward_kernel(
    logits_ptr, targets_ptr, logp_ptr, entropy_ptr, peak_ptr, log_sum_ptr, s_ptr, u_ptr, chosen_ptr, width, first, size,
    logits_m, targets_m, SCALE: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, LOWEST: tl.constexpr, ABSENT: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_m
    if BEGIN:
        m = tl.full([], LOWEST, dtype=WIDE)
        s = tl.full([], 0.0, dtype=WIDE)
        u = tl.full([], 0.0, dtype=WIDE)
        chosen = tl.full([], float("nan"), dtype=WIDE)
    else:
        m = tl.load(peak_ptr + row)
        s = tl.load(s_ptr + row)
        u = tl.load(u_ptr + row)
        chosen = tl.load(chosen_ptr + row)
    # asked for before the logits of the row, so that nothing waits for it behind them
    target = tl.load(targets_ptr + row * targets_m) - first
    here = (target >= 0) & (target < width)
    found = tl.load(logits_ptr + target, mask=here, other=0.0).to(WIDE) * SCALE
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        # what stands for a column that is not there weighs 0, and is finite, so that 0 times its distance is 0
        logit = tl.load(logits_ptr + column, mask=column < width, other=0.0).to(WIDE) * SCALE
        logit = tl.where(column < width, logit, ABSENT)
        larger = tl.maximum(m, tl.max(logit, axis=0))
        growth = tl.where(s > 0, larger - m, 0.0)
        shrink = tl.exp(-growth)
        distance = larger - logit
        e = tl.exp(-distance)
        u = tl.where(shrink > 0, shrink * (u + growth * s), 0.0) + tl.sum(e * distance, axis=0)
        s = s * shrink + tl.sum(e, axis=0)
        m = larger
    chosen = tl.where(here, found, chosen)
    tl.store(peak_ptr + row, m)
    if END:
        log_sum = tl.log(s)
        tl.store(logp_ptr + row, chosen - m - log_sum)
        tl.store(entropy_ptr + row, log_sum + u / s)
        tl.store(log_sum_ptr + row, log_sum)
    else:
        tl.store(s_ptr + row, s)
        tl.store(u_ptr + row, u)
        tl.store(chosen_ptr + row, chosen)


@triton.jit
def _backward_kernel(
    dlogp_ptr, dentropy_ptr, logits_ptr, targets_ptr, entropy_ptr, peak_ptr, log_sum_ptr, width, first, dlogp_m, dentropy_m,
    logits_m, targets_m, SCALE: tl.constexpr, ENTROPIC: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    logits_ptr += row * logits_m
    dlogp = tl.load(dlogp_ptr + row * dlogp_m).to(WIDE) * SCALE
    target = tl.load(targets_ptr + row * targets_m) - first
    peak = tl.load(peak_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    logit = tl.load(logits_ptr + column, mask=inside, other=0.0).to(WIDE) * SCALE
    logp = logit - peak - log_sum
    probability = tl.exp(logp)
    dlogit = dlogp * (tl.where(column == target, 1.0, 0.0) - probability)
    if ENTROPIC:
        dentropy = tl.load(dentropy_ptr + row * dentropy_m).to(WIDE) * SCALE
        dlogit -= dentropy * probability * (logp + tl.load(entropy_ptr + row))
    tl.store(logits_ptr + column, dlogit.to(logits_ptr.dtype.element_ty), mask=inside)
