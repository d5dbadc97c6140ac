"""Gated SiLU in Triton: elementwise, one row and `COLUMNS` channels a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, wide

COLUMNS = 1024


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """The product silu(gate) * up, [..., I], contiguous."""
    size = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel() == 0:
        return y
    rows = gate_up.reshape(-1, 2 * size)
    columns = min(COLUMNS, triton.next_power_of_2(size))
    with on_device_of(gate_up):
        _forward_kernel[(rows.shape[0], triton.cdiv(size, columns))](
            rows, y, size, *rows.stride(), WIDE=wide(gate_up), COLUMNS=columns, **ROUNDING
        )
    return y


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The cotangent of gate_up, [..., 2 I], contiguous."""
    return _pull(dy, gate_up, None)


def backward_with_value(dy: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cotangent of gate_up, and the product again, up to a rounding of float32 inside; both contiguous."""
    y = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    return _pull(dy, gate_up, y), y


def _pull(dy: torch.Tensor, gate_up: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows, dy_rows = gate_up.reshape(-1, 2 * size), dy.reshape(-1, size)
    columns = min(COLUMNS, triton.next_power_of_2(size))
    with on_device_of(gate_up):
        _backward_kernel[(rows.shape[0], triton.cdiv(size, columns))](
            dy_rows, rows, out, out if y is None else y, size, *dy_rows.stride(), *rows.stride(),
            VALUE=y is not None, WIDE=wide(gate_up), COLUMNS=columns, **ROUNDING,
        )  # fmt: skip
    return out


@triton.jit
def _forward_kernel(x_ptr, y_ptr, size, x_row, x_column, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    x_ptr += row * x_row
    gate = tl.load(x_ptr + column * x_column, mask=inside, other=0.0).to(WIDE)
    up = tl.load(x_ptr + (size + column) * x_column, mask=inside, other=0.0).to(WIDE)
    activated = gate / (1 + tl.exp(-gate))
    y = activated.to(y_ptr.dtype.element_ty).to(WIDE) * up
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, out_ptr, y_ptr, size, dy_row, dy_column, x_row, x_column,
    VALUE: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    x_ptr += row * x_row
    out_ptr += row * (2 * size)
    dy = tl.load(dy_ptr + row * dy_row + column * dy_column, mask=inside, other=0.0).to(WIDE)
    gate = tl.load(x_ptr + column * x_column, mask=inside, other=0.0).to(WIDE)
    up = tl.load(x_ptr + (size + column) * x_column, mask=inside, other=0.0).to(WIDE)
    s = 1 / (1 + tl.exp(-gate))
    activated = gate * s
    dgate = dy * up * (s + activated * (1 - s))
    activated = activated.to(out_ptr.dtype.element_ty).to(WIDE)
    dup = dy * activated
    tl.store(out_ptr + column, dgate.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + size + column, dup.to(out_ptr.dtype.element_ty), mask=inside)
    if VALUE:
        y = activated * up
        tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)
