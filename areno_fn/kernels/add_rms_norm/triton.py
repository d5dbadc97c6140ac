"""A sum and its RMS normalisation in Triton: both summands are read once, and rows stay in registers.

The backward adds the cotangent of the sum to that of the normalisation, writes the normalised rows again for a
product that needs them, and sums the weight's gradient per program in a fixed order: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import (
    ROUNDING,
    Steps,
    lines_of,
    on_device_of,
    places,
    read,
    resident,
    summed,
    tile,
    warps,
    wide,
    write,
)
from areno_fn.kernels.rms_norm.triton import LARGEST


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its scaled rows, [..., D], contiguous."""
    _fits(x)
    total, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if y.numel() == 0:
        return total, y
    lines = lines_of(x, residual)
    size = x.shape[-1]
    rows, columns = tile(size)
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(lines.rows, rows),)](
            *lines.tensors, weight, total, y, lines.rows, lines.inner, size,
            *lines.tensors[0].stride(), *lines.tensors[1].stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, FLAT=lines.flat, MASKED=columns != size or lines.rows % rows != 0,
            WIDE=wide(x), ROWS=rows, COLUMNS=columns, num_warps=warps(rows * columns), **ROUNDING,
        )  # fmt: skip
    return total, y


def backward(
    dtotal: torch.Tensor,
    dnormal: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangent of both summands, that of the weight, and the scaled rows; contiguous."""
    _fits(total)
    dx, y = (torch.empty(total.shape, dtype=total.dtype, device=total.device) for _ in range(2))
    if dx.numel() == 0:
        return dx, torch.zeros(weight.shape, dtype=weight.dtype, device=total.device), y
    lines = lines_of(dtotal, dnormal, total)
    size = total.shape[-1]
    step = walk(size)
    columns = triton.next_power_of_2(size)
    programs = min(triton.cdiv(lines.rows, step.rows), resident(total, step.warps, step.held))
    partial_dtype = torch.float64 if total.dtype == torch.float64 else torch.float32
    partial = torch.empty(programs, size, dtype=partial_dtype, device=total.device)
    with on_device_of(total):
        _backward_kernel[(programs,)](
            *lines.tensors, weight, dx, y, partial, lines.rows, programs * step.rows, lines.inner, size,
            *lines.tensors[0].stride(), *lines.tensors[1].stride(), *lines.tensors[2].stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, FLAT=lines.flat,
            MASKED=columns != size or lines.rows % step.rows != 0, WIDE=wide(total), ROWS=step.rows, COLUMNS=columns,
            STAGES=step.stages, num_warps=step.warps, **ROUNDING,
        )  # fmt: skip
    return dx, summed(partial, weight.dtype), y


def walk(size: int) -> Steps:
    """The steps of the backward over lines of so many elements."""
    rows, columns = tile(size, 2048)
    return Steps(rows=rows, warps=min(8, warps(rows * columns)), stages=2, held=16)


def _fits(x: torch.Tensor) -> None:
    require(x.shape[-1] <= LARGEST, "add_rms_norm", f"on the GPU the last dimension must be at most {LARGEST}", x)


@triton.jit
def _forward_kernel(
    x_ptr, r_ptr, w_ptr, total_ptr, y_ptr, count, B, D, x_a, x_b, x_d, r_a, r_b, r_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, FLAT: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < count)[:, None] & (column < D)[None, :]
    x = read(x_ptr + places(row, B, x_a, x_b, FLAT)[:, None] + (column * x_d)[None, :], inside, MASKED).to(WIDE)
    r = read(r_ptr + places(row, B, r_a, r_b, FLAT)[:, None] + (column * r_d)[None, :], inside, MASKED).to(WIDE)
    w = read(w_ptr + column * w_d, column < D, MASKED).to(WIDE)
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    s = (x + r).to(NARROW).to(WIDE)
    write(total_ptr + at, s, inside, MASKED)
    normal = s * tl.rsqrt(tl.sum(s * s, axis=1) / D + EPS)[:, None]
    y = normal * (1 + w)[None, :] if ZERO_CENTRED else normal.to(NARROW).to(WIDE) * w[None, :]
    write(y_ptr + at, y, inside, MASKED)


@triton.jit
def _backward_kernel(
    dt_ptr, dn_ptr, total_ptr, w_ptr, dx_ptr, y_ptr, partial_ptr, count, stride, B, D,
    dt_a, dt_b, dt_d, dn_a, dn_b, dn_d, total_a, total_b, total_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, FLAT: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = dx_ptr.dtype.element_ty
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    w = read(w_ptr + column * w_d, column < D, MASKED).to(WIDE)
    if ZERO_CENTRED:
        w = 1 + w
    dw = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for first in tl.range(program * ROWS, count, stride, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < D)[None, :]
        dt_at = places(row, B, dt_a, dt_b, FLAT)[:, None] + (column * dt_d)[None, :]
        dn_at = places(row, B, dn_a, dn_b, FLAT)[:, None] + (column * dn_d)[None, :]
        total_at = places(row, B, total_a, total_b, FLAT)[:, None] + (column * total_d)[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        s = read(total_ptr + total_at, inside, MASKED).to(WIDE)
        dnormal = read(dn_ptr + dn_at, inside, MASKED).to(WIDE)
        dtotal = read(dt_ptr + dt_at, inside, MASKED).to(WIDE)
        reciprocal = tl.rsqrt(tl.sum(s * s, axis=1) / D + EPS)[:, None]
        normal = s * reciprocal
        if MASKED:
            normal = tl.where(inside, normal, 0.0)  # a row that is not there may be 0 / 0
        scaled = normal if ZERO_CENTRED else normal.to(NARROW).to(WIDE)
        g = dnormal * w[None, :]
        dx = reciprocal * (g - normal * (tl.sum(g * normal, axis=1) / D)[:, None])
        write(dx_ptr + at, dtotal + dx, inside, MASKED)
        write(y_ptr + at, scaled * w[None, :], inside, MASKED)
        dw += dnormal * scaled
    tl.store(partial_ptr + program.to(tl.int64) * D + column, tl.sum(dw, axis=0), mask=column < D)
