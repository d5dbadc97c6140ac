"""Gated activations in Triton, for the kernels that differ in the activation alone: one row and some channels a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, read, wide, write

SILU, GELU, GELU_TANH = 0, 1, 2
"""Numbers of the activations, constants of a launch."""


def block(size: int) -> tuple[int, int]:
    """(channels, warps) of a program, of rows of so many."""
    columns = min(1024, triton.next_power_of_2(size))
    return columns, max(1, columns // 256)


def forward(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    """The product activation(gate) * up, [..., I], contiguous."""
    size = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel() == 0:
        return y
    rows = gate_up.reshape(-1, 2 * size)
    columns, threads = block(size)
    with on_device_of(gate_up):
        _forward_kernel[(rows.shape[0] * triton.cdiv(size, columns),)](
            rows, y, size, *rows.stride(), ACTIVATION=activation, MASKED=size % columns != 0, WIDE=wide(gate_up),
            COLUMNS=columns, num_warps=threads, **ROUNDING,
        )  # fmt: skip
    return y


def backward(dy: torch.Tensor, gate_up: torch.Tensor, y: torch.Tensor | None, activation: int) -> torch.Tensor:
    """The cotangent of gate_up, [..., 2 I], contiguous; the product is written again to `y`, where it is given."""
    size = gate_up.shape[-1] // 2
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows, dy_rows = gate_up.reshape(-1, 2 * size), dy.reshape(-1, size)
    columns, threads = block(size)
    with on_device_of(gate_up):
        _backward_kernel[(rows.shape[0] * triton.cdiv(size, columns),)](
            dy_rows, rows, out, out if y is None else y, size, *dy_rows.stride(), *rows.stride(),
            ACTIVATION=activation, VALUE=y is not None, MASKED=size % columns != 0, WIDE=wide(gate_up),
            COLUMNS=columns, num_warps=threads, **ROUNDING,
        )  # fmt: skip
    return out


@triton.jit
def _place(size, COLUMNS: tl.constexpr):
    """The row of a program and its channels; those of one row lie side by side in memory, and so are read at one time."""
    number = tl.program_id(0)
    blocks = tl.cdiv(size, COLUMNS)
    return (number // blocks).to(tl.int64), (number % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """The activation of a gate, and its slope."""
    if ACTIVATION == 0:
        s = 1 / (1 + tl.exp(-gate))
        value = gate * s
        slope = s + value * (1 - s)
    elif ACTIVATION == 1:
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))  # mass of the normal distribution
        value = gate * below
        slope = below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:
        square = gate * gate
        half = 1 / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * square)))  # (1 + tanh) / 2
        rise = 1.5957691216057308 * (1 + 0.134145 * square) * half * (1 - half)
        value = gate * half
        slope = half + gate * tl.where(half * (1 - half) > 0, rise, 0.0)
    return value, slope


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, size, x_row, x_column,
    ACTIVATION: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = _place(size, COLUMNS)
    inside = column < size
    x_ptr += row * x_row
    gate = read(x_ptr + column * x_column, inside, MASKED).to(WIDE)
    up = read(x_ptr + (size + column) * x_column, inside, MASKED).to(WIDE)
    activated, _ = _activated(gate, ACTIVATION)
    y = activated.to(y_ptr.dtype.element_ty).to(WIDE) * up
    write(y_ptr + row * size + column, y, inside, MASKED)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, out_ptr, y_ptr, size, dy_row, dy_column, x_row, x_column,
    ACTIVATION: tl.constexpr, VALUE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = _place(size, COLUMNS)
    inside = column < size
    x_ptr += row * x_row
    out_ptr += row * (2 * size)
    dy = read(dy_ptr + row * dy_row + column * dy_column, inside, MASKED).to(WIDE)
    gate = read(x_ptr + column * x_column, inside, MASKED).to(WIDE)
    up = read(x_ptr + (size + column) * x_column, inside, MASKED).to(WIDE)
    activated, slope = _activated(gate, ACTIVATION)
    write(out_ptr + column, dy * up * slope, inside, MASKED)
    activated = activated.to(out_ptr.dtype.element_ty).to(WIDE)
    write(out_ptr + size + column, dy * activated, inside, MASKED)
    if VALUE:
        write(y_ptr + row * size + column, activated * up, inside, MASKED)
