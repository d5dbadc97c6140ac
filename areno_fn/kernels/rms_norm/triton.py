"""RMS normalisation in Triton, of rows or of the sum of two tensors: every row is read once and stays in registers.

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
    require_fits("rms_norm", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_forward(x, x if gate is None else gate, weight, y, y, eps, zero_centred, gated=gate is not None)
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
    require_fits("rms_norm", x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(x.shape if gate is not None else (0,), dtype=x.dtype, device=x.device)
    beside, step = x if gate is None else gate, walk(x.shape[-1])
    dweight = launch_backward(dy, x, beside, weight, dx, dgate, eps, zero_centred, step, gated=gate is not None)
    return dx, dweight, dgate


def walk(size: int) -> Steps:
    """The steps of the backward over lines of so many elements."""
    rows, columns = tile(size, 4096 if size > 512 else 1024)
    return Steps(rows=rows, warps=min(8, warps(2 * rows * columns)), stages=3, held=32)


def require_fits(kernel: str, x: torch.Tensor) -> None:
    """Refuses rows that are too wide for the registers."""
    require(x.shape[-1] <= LARGEST, kernel, f"on the GPU the last dimension must be at most {LARGEST}", x)


def launch_forward(
    x: torch.Tensor,
    beside: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    y: torch.Tensor,
    eps: float,
    zero_centred: bool,
    *,
    gated: bool = False,
    added: bool = False,
) -> None:
    """Writes the scaled rows of x to y.

    Gated, `beside` is the gate. Added, it is a summand, and the sum, whose rows are scaled, goes to `total`.
    """
    if y.numel() == 0:
        return
    lines = lines_of(x, beside)
    size = x.shape[-1]
    rows, columns = tile(size)
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(lines.rows, rows),)](
            *lines.tensors, weight, total, y, lines.rows, lines.inner, size,
            *lines.tensors[0].stride(), *lines.tensors[1].stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, GATED=gated, ADDED=added, FLAT=lines.flat,
            MASKED=columns != size or lines.rows % rows != 0, WIDE=wide(x), ROWS=rows, COLUMNS=columns,
            num_warps=warps(rows * columns), **ROUNDING,
        )  # fmt: skip


def launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    beside: torch.Tensor,
    weight: torch.Tensor,
    dx: torch.Tensor,
    other: torch.Tensor,
    eps: float,
    zero_centred: bool,
    step: Steps,
    *,
    gated: bool = False,
    added: bool = False,
) -> torch.Tensor:
    """Writes the cotangent of x to dx, and returns that of the weight.

    Gated, `beside` is the gate, and `other` takes its cotangent. Added, x is a sum, `beside` the cotangent that it has by
    itself, and `other` takes the scaled rows again.
    """
    if dx.numel() == 0:
        return torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
    lines = lines_of(dy, x, beside)
    size = x.shape[-1]
    columns = triton.next_power_of_2(size)
    programs = min(triton.cdiv(lines.rows, step.rows), resident(x, step.warps, step.held))
    partial = torch.empty(programs, size, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    with on_device_of(x):
        _backward_kernel[(programs,)](
            *lines.tensors, weight, dx, other, partial, lines.rows, programs * step.rows, lines.inner, size,
            *lines.tensors[0].stride(), *lines.tensors[1].stride(), *lines.tensors[2].stride(), weight.stride(0),
            EPS=eps, ZERO_CENTRED=zero_centred, GATED=gated, ADDED=added, FLAT=lines.flat,
            MASKED=columns != size or lines.rows % step.rows != 0, WIDE=wide(x), ROWS=step.rows, COLUMNS=columns,
            STAGES=step.stages, num_warps=step.warps, **ROUNDING,
        )  # fmt: skip
    return summed(partial, weight.dtype)


@triton.jit
def _lines(
    ptr, row, column, inside, B, outer, inner, step, FLAT: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr
):
    """Some lines of a tensor."""
    at = places(row, B, outer, inner, FLAT)[:, None] + (column * step)[None, :]
    return read(ptr + at, inside, MASKED).to(WIDE)


@triton.jit
def _forward_kernel(
    x_ptr, beside_ptr, w_ptr, total_ptr, y_ptr, count, B, D, x_a, x_b, x_d, beside_a, beside_b, beside_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, FLAT: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < count)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    x = _lines(x_ptr, row, column, inside, B, x_a, x_b, x_d, FLAT, MASKED, WIDE)
    if ADDED:
        x += _lines(beside_ptr, row, column, inside, B, beside_a, beside_b, beside_d, FLAT, MASKED, WIDE)
        x = x.to(NARROW).to(WIDE)
        write(total_ptr + at, x, inside, MASKED)
    w = read(w_ptr + column * w_d, column < D, MASKED).to(WIDE)
    normal = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
    y = normal * (1 + w)[None, :] if ZERO_CENTRED else normal.to(NARROW).to(WIDE) * w[None, :]
    if GATED:
        gate = _lines(beside_ptr, row, column, inside, B, beside_a, beside_b, beside_d, FLAT, MASKED, WIDE)
        y = y.to(NARROW).to(WIDE) * (gate / (1 + tl.exp(-gate)))
    write(y_ptr + at, y, inside, MASKED)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, beside_ptr, w_ptr, dx_ptr, other_ptr, partial_ptr, count, stride, B, D,
    dy_a, dy_b, dy_d, x_a, x_b, x_d, beside_a, beside_b, beside_d, w_d,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, FLAT: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
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
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        dy = _lines(dy_ptr, row, column, inside, B, dy_a, dy_b, dy_d, FLAT, MASKED, WIDE)
        x = _lines(x_ptr, row, column, inside, B, x_a, x_b, x_d, FLAT, MASKED, WIDE)
        if GATED or ADDED:
            beside = _lines(beside_ptr, row, column, inside, B, beside_a, beside_b, beside_d, FLAT, MASKED, WIDE)
        reciprocal = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        normal = x * reciprocal
        if MASKED:
            normal = tl.where(inside, normal, 0.0)  # a row that is not there may be 0 / 0
        scaled = normal if ZERO_CENTRED else normal.to(NARROW).to(WIDE)
        if GATED:
            s = 1 / (1 + tl.exp(-beside))
            y = (scaled * w[None, :]).to(NARROW).to(WIDE)
            write(other_ptr + at, dy * y * (s * (1 + beside * (1 - s))), inside, MASKED)
            dy *= beside * s
        g = dy * w[None, :]
        dx = reciprocal * (g - normal * (tl.sum(g * normal, axis=1) / D)[:, None])
        if ADDED:
            dx += beside
            write(other_ptr + at, scaled * w[None, :], inside, MASKED)
        write(dx_ptr + at, dx, inside, MASKED)
        dw += dy * scaled
    tl.store(partial_ptr + program.to(tl.int64) * D + column, tl.sum(dw, axis=0), mask=column < D)
