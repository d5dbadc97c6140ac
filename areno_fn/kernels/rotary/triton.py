"""Rotary embedding in Triton: one position and a tile of its heads a program; the backward turns the other way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, read, rows_of, wide, write


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The rotated heads, like x, contiguous."""
    return _rotate(x, cos, sin, interleaved, backwards=False)


def backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The cotangent of x, like dy, contiguous."""
    return _rotate(dy, cos, sin, interleaved, backwards=True)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backwards: bool) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    half = cos.shape[-1]
    x_nhd, cos, sin = rows_of(x), cos.reshape(-1, half), sin.reshape(-1, half)
    positions, heads, size = x_nhd.shape
    columns, rest = triton.next_power_of_2(half), size - 2 * half
    rows = min(triton.next_power_of_2(heads), max(1, 1024 // columns))
    with on_device_of(x):
        _rotate_kernel[(positions, triton.cdiv(heads, rows))](
            x_nhd, cos, sin, y, heads, half, size, *x_nhd.stride(), *cos.stride(), *sin.stride(),
            BACKWARDS=backwards, INTERLEAVED=interleaved, MASKED=columns != half or heads % rows != 0, WIDE=wide(x),
            ROWS=rows, COLUMNS=columns, REST=triton.next_power_of_2(rest) if rest else 0, **ROUNDING,
        )  # fmt: skip
    return y


@triton.jit
def of_angles(ptr, head, at, inside, MASKED: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr):
    """Cosines or sines, read once a head: laying out one row for all of them would make threads wait."""
    return read(ptr + head * 0 + at, inside, MASKED).to(NARROW).to(WIDE)


@triton.jit
def turned(first, second, cos, sin, NARROW: tl.constexpr, WIDE: tl.constexpr):
    """Pairs turned by angles, products rounded."""
    y_first = (first * cos).to(NARROW).to(WIDE) - (second * sin).to(NARROW).to(WIDE)
    y_second = (second * cos).to(NARROW).to(WIDE) + (first * sin).to(NARROW).to(WIDE)
    return y_first, y_second


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, heads, half, size, x_n, x_h, x_d, cos_n, cos_d, sin_n, sin_d,
    BACKWARDS: tl.constexpr, INTERLEAVED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    position = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < heads) & (column < half)
    cos = of_angles(cos_ptr + position * cos_n, head, column * cos_d, inside, MASKED, NARROW, WIDE)
    sin = of_angles(sin_ptr + position * sin_n, head, column * sin_d, inside, MASKED, NARROW, WIDE)
    if BACKWARDS:
        sin = -sin
    x_ptr += position * x_n
    y_ptr += position * heads * size
    x_at = x_ptr + head.to(tl.int64) * x_h
    y_at = y_ptr + head * size
    if INTERLEAVED:  # a pair lies together: whole lines are read, and taken apart in registers
        both = tl.arange(0, 2 * COLUMNS)[None, :]
        within = (head < heads) & (both < 2 * half)
        x = read(x_at + both.to(tl.int64) * x_d, within, MASKED).to(WIDE)
        first, second = tl.split(tl.reshape(x, [ROWS, COLUMNS, 2]))
    else:
        first = read(x_at + column.to(tl.int64) * x_d, inside, MASKED).to(WIDE)
        second = read(x_at + (column + half).to(tl.int64) * x_d, inside, MASKED).to(WIDE)
    y_first, y_second = turned(first, second, cos, sin, NARROW, WIDE)
    if INTERLEAVED:
        y = tl.reshape(tl.join(y_first, y_second), [ROWS, 2 * COLUMNS])
        write(y_at + both, y, within, MASKED)
    else:
        write(y_at + column, y_first, inside, MASKED)
        write(y_at + half + column, y_second, inside, MASKED)
    if REST > 0:
        still = tl.arange(0, REST)[None, :] + 2 * half
        behind = (head < heads) & (still < size)
        x = tl.load(x_at + still.to(tl.int64) * x_d, mask=behind, other=0.0)
        tl.store(y_at + still, x, mask=behind)
