"""RMS normalisation in Triton: every row is read once and stays in registers.

The backward sums the weight's gradient per program, each over its own rows in a fixed order, and then over
the programs: no atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import ROUNDING, on_device_of, resident, rows_of, summed, tile, warps, wide

LARGEST = 65536
"""The widest row that fits into registers."""


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    """The scaled rows, [..., D], contiguous, in the dtype of x."""
    _fits(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x_abd = rows_of(x)
    count = x_abd.shape[0] * x_abd.shape[1]
    rows, columns = tile(x.shape[-1])
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(count, rows),)](
            x_abd, weight, y, count, *x_abd.shape[1:], *x_abd.stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, WIDE=wide(x), ROWS=rows, COLUMNS=columns,
            num_warps=warps(rows * columns), **ROUNDING,
        )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cotangents dx [..., D], contiguous, and dweight [D]."""
    _fits(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
    x_abd, dy_abd = rows_of(x), rows_of(dy)
    count = x_abd.shape[0] * x_abd.shape[1]
    rows, columns = tile(x.shape[-1], 1024)
    threads = min(8, warps(2 * rows * columns))
    programs = min(triton.cdiv(count, rows), resident(x, threads))
    partial_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    partial = torch.empty(programs, x.shape[-1], dtype=partial_dtype, device=x.device)
    with on_device_of(x):
        _backward_kernel[(programs,)](
            dy_abd, x_abd, weight, dx, partial, count, programs * rows, *x_abd.shape[1:],
            *dy_abd.stride(), *x_abd.stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, WIDE=wide(x), ROWS=rows, COLUMNS=columns,
            num_warps=threads, **ROUNDING,
        )  # fmt: skip
    return dx, summed(partial, weight.dtype)


def _fits(x: torch.Tensor) -> None:
    require(x.shape[-1] <= LARGEST, "rms_norm", f"on the GPU the last dimension must be at most {LARGEST}", x)


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, y_ptr, count, B, D, x_a, x_b, x_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < count)[:, None] & (column < D)[None, :]
    x_at = ((row // B) * x_a + (row % B) * x_b)[:, None] + (column * x_d)[None, :]
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(WIDE)
    w = tl.load(w_ptr + column * w_d, mask=column < D, other=0.0).to(WIDE)
    normal = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    y = normal * (1 + w)[None, :] if ZERO_CENTRED else normal.to(NARROW).to(WIDE) * w[None, :]
    tl.store(y_ptr + row[:, None] * D + column[None, :], y.to(NARROW), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, count, stride, B, D, dy_a, dy_b, dy_d, x_a, x_b, x_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    w = tl.load(w_ptr + column * w_d, mask=column < D, other=0.0).to(WIDE)
    if ZERO_CENTRED:
        w = 1 + w
    dw = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    first = program * ROWS
    while first < count:
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < D)[None, :]
        dy_at = ((row // B) * dy_a + (row % B) * dy_b)[:, None] + (column * dy_d)[None, :]
        x_at = ((row // B) * x_a + (row % B) * x_b)[:, None] + (column * x_d)[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(WIDE)
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(WIDE)
        reciprocal = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        normal = tl.where(inside, x * reciprocal, 0.0)  # a row that is not there may be 0 / 0
        g = dy * w[None, :]
        dx = reciprocal * (g - normal * (tl.sum(g * normal, axis=1) / D)[:, None])
        tl.store(dx_ptr + row[:, None] * D + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
        scaled = normal if ZERO_CENTRED else normal.to(x_ptr.dtype.element_ty).to(WIDE)
        dw += dy * scaled
        first += stride
    tl.store(partial_ptr + program * D + column, tl.sum(dw, axis=0), mask=column < D)
