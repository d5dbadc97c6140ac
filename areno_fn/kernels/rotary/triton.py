"""Rotary embedding in Triton: one position and a tile of its heads a program; the backward turns the other way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, rows_of, wide


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotated heads, like x, contiguous."""
    return _rotate(x, cos, sin, backwards=False)


def backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The cotangent of x, like dy, contiguous."""
    return _rotate(dy, cos, sin, backwards=True)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backwards: bool) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    half = x.shape[-1] // 2
    x_nhd, cos, sin = rows_of(x), cos.reshape(-1, half), sin.reshape(-1, half)
    positions, heads, _ = x_nhd.shape
    columns = triton.next_power_of_2(half)
    rows = min(triton.next_power_of_2(heads), max(1, 1024 // columns))
    with on_device_of(x):
        _rotate_kernel[(positions, triton.cdiv(heads, rows))](
            x_nhd, cos, sin, y, heads, half, *x_nhd.stride(), *cos.stride(), *sin.stride(),
            BACKWARDS=backwards, WIDE=wide(x), ROWS=rows, COLUMNS=columns, **ROUNDING,
        )  # fmt: skip
    return y


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, heads, half, x_n, x_h, x_d, cos_n, cos_d, sin_n, sin_d,
    BACKWARDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    position = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    cos = tl.load(cos_ptr + position * cos_n + column * cos_d, mask=column < half, other=0.0)
    sin = tl.load(sin_ptr + position * sin_n + column * sin_d, mask=column < half, other=0.0)
    cos = cos.to(NARROW).to(WIDE)[None, :]
    sin = sin.to(NARROW).to(WIDE)[None, :]
    if BACKWARDS:
        sin = -sin
    x_at = position * x_n + (head * x_h)[:, None] + (column * x_d)[None, :]
    first = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(WIDE)
    second = tl.load(x_ptr + x_at + half * x_d, mask=inside, other=0.0).to(WIDE)
    y_first = (first * cos).to(NARROW).to(WIDE) - (second * sin).to(NARROW).to(WIDE)
    y_second = (second * cos).to(NARROW).to(WIDE) + (first * sin).to(NARROW).to(WIDE)
    y_at = (position * heads + head)[:, None] * (2 * half) + column[None, :]
    tl.store(y_ptr + y_at, y_first.to(NARROW), mask=inside)
    tl.store(y_ptr + y_at + half, y_second.to(NARROW), mask=inside)
