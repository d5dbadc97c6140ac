"""A sum and its RMS normalisation in Triton: both summands are read once, and rows stay in registers.

The backward adds the cotangent of the sum to that of the normalisation, writes the normalised rows again for a
product that needs them, and sums the weight's gradient per program in a fixed order: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import ROUNDING, on_device_of, resident, rows_of, summed, tile, warps, wide
from areno_fn.kernels.rms_norm.triton import LARGEST


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its scaled rows, [..., D], contiguous."""
    _fits(x)
    total, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if y.numel() == 0:
        return total, y
    x_abd, r_abd = rows_of(x), rows_of(residual)
    count = x_abd.shape[0] * x_abd.shape[1]
    rows, columns = tile(x.shape[-1])
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(count, rows),)](
            x_abd, r_abd, weight, total, y, count, *x_abd.shape[1:], *x_abd.stride(), *r_abd.stride(), weight.stride(0),
            EPS=eps, WIDE=wide(x), ROWS=rows, COLUMNS=columns, num_warps=warps(rows * columns), **ROUNDING,
        )  # fmt: skip
    return total, y


def backward(
    dtotal: torch.Tensor, dnormal: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangent of both summands, that of the weight, and the scaled rows; contiguous."""
    _fits(total)
    dx, y = (torch.empty(total.shape, dtype=total.dtype, device=total.device) for _ in range(2))
    if dx.numel() == 0:
        return dx, torch.zeros(weight.shape, dtype=weight.dtype, device=total.device), y
    total = total.contiguous()
    dt_abd, dn_abd = rows_of(dtotal), rows_of(dnormal)
    count = dt_abd.shape[0] * dt_abd.shape[1]
    rows, columns = tile(total.shape[-1], 1024)
    threads = min(8, warps(2 * rows * columns))
    programs = min(triton.cdiv(count, rows), resident(total, threads))
    partial_dtype = torch.float64 if total.dtype == torch.float64 else torch.float32
    partial = torch.empty(programs, total.shape[-1], dtype=partial_dtype, device=total.device)
    with on_device_of(total):
        _backward_kernel[(programs,)](
            dt_abd, dn_abd, total, weight, dx, y, partial, count, programs * rows, *dt_abd.shape[1:],
            *dt_abd.stride(), *dn_abd.stride(), weight.stride(0),
            EPS=eps, WIDE=wide(total), ROWS=rows, COLUMNS=columns, num_warps=threads, **ROUNDING,
        )  # fmt: skip
    return dx, summed(partial, weight.dtype), y


def _fits(x: torch.Tensor) -> None:
    require(x.shape[-1] <= LARGEST, "add_rms_norm", f"on the GPU the last dimension must be at most {LARGEST}", x)


@triton.jit
def _forward_kernel(
    x_ptr, r_ptr, w_ptr, total_ptr, y_ptr, count, B, D, x_a, x_b, x_d, r_a, r_b, r_d, w_d,
    EPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < count)[:, None] & (column < D)[None, :]
    x_at = ((row // B) * x_a + (row % B) * x_b)[:, None] + (column * x_d)[None, :]
    r_at = ((row // B) * r_a + (row % B) * r_b)[:, None] + (column * r_d)[None, :]
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(WIDE)
    r = tl.load(r_ptr + r_at, mask=inside, other=0.0).to(WIDE)
    w = tl.load(w_ptr + column * w_d, mask=column < D, other=0.0).to(WIDE)
    total = (x + r).to(NARROW)
    y_at = row[:, None] * D + column[None, :]
    tl.store(total_ptr + y_at, total, mask=inside)
    s = total.to(WIDE)
    normal = s * tl.rsqrt(tl.sum(s * s, axis=1) / D + EPS)[:, None]
    tl.store(y_ptr + y_at, (normal.to(NARROW).to(WIDE) * w[None, :]).to(NARROW), mask=inside)


@triton.jit
def _backward_kernel(
    dt_ptr, dn_ptr, total_ptr, w_ptr, dx_ptr, y_ptr, partial_ptr, count, stride, B, D,
    dt_a, dt_b, dt_d, dn_a, dn_b, dn_d, w_d,
    EPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = dx_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    w = tl.load(w_ptr + column * w_d, mask=column < D, other=0.0).to(WIDE)
    dw = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    first = program * ROWS
    while first < count:
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < D)[None, :]
        dt_at = ((row // B) * dt_a + (row % B) * dt_b)[:, None] + (column * dt_d)[None, :]
        dn_at = ((row // B) * dn_a + (row % B) * dn_b)[:, None] + (column * dn_d)[None, :]
        at = row[:, None] * D + column[None, :]
        dtotal = tl.load(dt_ptr + dt_at, mask=inside, other=0.0).to(WIDE)
        dnormal = tl.load(dn_ptr + dn_at, mask=inside, other=0.0).to(WIDE)
        s = tl.load(total_ptr + at, mask=inside, other=0.0).to(WIDE)
        reciprocal = tl.rsqrt(tl.sum(s * s, axis=1) / D + EPS)[:, None]
        normal = tl.where(inside, s * reciprocal, 0.0)  # a row that is not there may be 0 / 0
        scaled = normal.to(NARROW).to(WIDE)
        g = dnormal * w[None, :]
        dx = reciprocal * (g - normal * (tl.sum(g * normal, axis=1) / D)[:, None])
        tl.store(dx_ptr + at, (dtotal + dx).to(NARROW), mask=inside)
        tl.store(y_ptr + at, (scaled * w[None, :]).to(NARROW), mask=inside)
        dw += dnormal * scaled
        first += stride
    tl.store(partial_ptr + program * D + column, tl.sum(dw, axis=0), mask=column < D)
