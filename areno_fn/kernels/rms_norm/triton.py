"""RMS normalisation in Triton: every row is read once and stays in registers.

The backward sums the weight's gradient per program, each over its own rows in a fixed order, and then over
the programs: no atomics, so the same inputs give the same bits. While a program works on some rows, the next ones are on
their way.
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

LARGEST = 65536
"""The widest row that fits into registers."""


def forward(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float, zero_centred: bool
) -> torch.Tensor:
    """The scaled rows, [..., D], contiguous, in the dtype of x."""
    _fits(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    lines = lines_of(x, x if gate is None else gate)
    size = x.shape[-1]
    rows, columns = tile(size)
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(lines.rows, rows),)](
            *lines.tensors, weight, y, lines.rows, lines.inner, size,
            *lines.tensors[0].stride(), *lines.tensors[1].stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, GATED=gate is not None, FLAT=lines.flat,
            MASKED=columns != size or lines.rows % rows != 0, WIDE=wide(x), ROWS=rows, COLUMNS=columns,
            num_warps=warps(rows * columns), **ROUNDING,
        )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents dx [..., D], contiguous, dweight [D] and dgate [..., D], empty where there is no gate."""
    _fits(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(x.shape if gate is not None else (0,), dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(weight.shape, dtype=weight.dtype, device=x.device), dgate
    lines = lines_of(dy, x, x if gate is None else gate)
    size = x.shape[-1]
    step = walk(size)
    columns = triton.next_power_of_2(size)
    programs = min(triton.cdiv(lines.rows, step.rows), resident(x, step.warps, step.held))
    partial_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    partial = torch.empty(programs, size, dtype=partial_dtype, device=x.device)
    with on_device_of(x):
        _backward_kernel[(programs,)](
            *lines.tensors, weight, dx, dgate, partial, lines.rows, programs * step.rows, lines.inner, size,
            *lines.tensors[0].stride(), *lines.tensors[1].stride(), *lines.tensors[2].stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, GATED=gate is not None, FLAT=lines.flat,
            MASKED=columns != size or lines.rows % step.rows != 0, WIDE=wide(x), ROWS=step.rows, COLUMNS=columns,
            STAGES=step.stages, num_warps=step.warps, **ROUNDING,
        )  # fmt: skip
    return dx, summed(partial, weight.dtype), dgate


def walk(size: int) -> Steps:
    """The steps of the backward over lines of so many elements."""
    rows, columns = tile(size, 4096 if size > 512 else 1024)
    return Steps(rows=rows, warps=min(8, warps(2 * rows * columns)), stages=3, held=32)


def _fits(x: torch.Tensor) -> None:
    require(x.shape[-1] <= LARGEST, "rms_norm", f"on the GPU the last dimension must be at most {LARGEST}", x)


@triton.jit
def _forward_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, count, B, D, x_a, x_b, x_d, gate_a, gate_b, gate_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, GATED: tl.constexpr, FLAT: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < count)[:, None] & (column < D)[None, :]
    x = read(x_ptr + places(row, B, x_a, x_b, FLAT)[:, None] + (column * x_d)[None, :], inside, MASKED).to(WIDE)
    w = read(w_ptr + column * w_d, column < D, MASKED).to(WIDE)
    normal = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
    y = normal * (1 + w)[None, :] if ZERO_CENTRED else normal.to(NARROW).to(WIDE) * w[None, :]
    if GATED:
        gate_at = places(row, B, gate_a, gate_b, FLAT)[:, None] + (column * gate_d)[None, :]
        gate = read(gate_ptr + gate_at, inside, MASKED).to(WIDE)
        y = y.to(NARROW).to(WIDE) * (gate / (1 + tl.exp(-gate)))
    write(y_ptr + row.to(tl.int64)[:, None] * D + column[None, :], y, inside, MASKED)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, dx_ptr, dgate_ptr, partial_ptr, count, stride, B, D,
    dy_a, dy_b, dy_d, x_a, x_b, x_d, gate_a, gate_b, gate_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, GATED: tl.constexpr, FLAT: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
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
        dy_at = places(row, B, dy_a, dy_b, FLAT)[:, None] + (column * dy_d)[None, :]
        x_at = places(row, B, x_a, x_b, FLAT)[:, None] + (column * x_d)[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        dy = read(dy_ptr + dy_at, inside, MASKED).to(WIDE)
        x = read(x_ptr + x_at, inside, MASKED).to(WIDE)
        reciprocal = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        normal = x * reciprocal
        if MASKED:
            normal = tl.where(inside, normal, 0.0)  # a row that is not there may be 0 / 0
        scaled = normal if ZERO_CENTRED else normal.to(NARROW).to(WIDE)
        if GATED:
            gate_at = places(row, B, gate_a, gate_b, FLAT)[:, None] + (column * gate_d)[None, :]
            gate = read(gate_ptr + gate_at, inside, MASKED).to(WIDE)
            s = 1 / (1 + tl.exp(-gate))
            y = (scaled * w[None, :]).to(NARROW).to(WIDE)
            write(dgate_ptr + at, dy * y * (s * (1 + gate * (1 - s))), inside, MASKED)
            dy *= gate * s
        g = dy * w[None, :]
        dx = reciprocal * (g - normal * (tl.sum(g * normal, axis=1) / D)[:, None])
        write(dx_ptr + at, dx, inside, MASKED)
        dw += dy * scaled
    tl.store(partial_ptr + program.to(tl.int64) * D + column, tl.sum(dw, axis=0), mask=column < D)
