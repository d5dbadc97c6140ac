"""The symmetric product in Triton: a program makes one tile at or below the diagonal, and writes it to both of its places."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import exact, on_device_of, wide

_LEAST = 16  # what a product on tensor cores takes


def blocks(size: int, count: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(edge of a tile, columns of a step, warps, stages) for so many matrices of [E, E]."""
    if dtype in (torch.float32, torch.float64):
        return 32, 32, 4, 1
    edge = 128 if count * triton.cdiv(size, 128) ** 2 >= 256 else 64
    return min(edge, max(_LEAST, triton.next_power_of_2(size))), 64, 8 if edge == 128 else 4, 3


def product(a: torch.Tensor, c: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    """The sum `alpha a a^T + beta c`, contiguous."""
    *stack, size, width = a.shape
    out = torch.empty(*stack, size, size, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    a = a.reshape(math.prod(stack), size, width)
    rest = a if c is None else c.reshape(math.prod(stack), size, size)
    edge, step, warps, stages = blocks(size, a.shape[0], a.dtype)
    many = triton.cdiv(size, edge)
    with on_device_of(a):
        _product_kernel[(many * (many + 1) // 2, a.shape[0])](
            a, rest, out, size, width, alpha, beta, *a.stride(), *rest.stride(), ADDED=c is not None, WIDE=wide(a),
            EXACT=exact(a), EDGE=edge, STEP=step, num_warps=warps, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def _product_kernel(
    a_ptr, c_ptr, out_ptr, size, width, alpha, beta, a_b, a_e, a_d, c_b, c_e, c_d,
    ADDED: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, EDGE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    # tiles are counted row by row: row i begins at i (i + 1) / 2; a root that is off by a rounding is put right
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    row = i * EDGE + tl.arange(0, EDGE)
    column = j * EDGE + tl.arange(0, EDGE)
    a_ptr += matrix * a_b
    left_at = a_ptr + row.to(tl.int64)[:, None] * a_e
    right_at = a_ptr + column.to(tl.int64)[:, None] * a_e
    total = tl.zeros([EDGE, EDGE], dtype=WIDE)
    for start in range(0, width, STEP):
        along = start + tl.arange(0, STEP)
        left = tl.load(
            left_at + along.to(tl.int64)[None, :] * a_d,
            mask=(row < size)[:, None] & (along < width)[None, :],
            other=0.0,
        )
        right = tl.load(
            right_at + along.to(tl.int64)[None, :] * a_d,
            mask=(column < size)[:, None] & (along < width)[None, :],
            other=0.0,
        )
        total += tl.dot(left.to(EXACT), tl.trans(right.to(EXACT)), input_precision="ieee", out_dtype=WIDE)
    total *= alpha
    inside = (row < size)[:, None] & (column < size)[None, :]
    if ADDED:
        c_at = c_ptr + matrix * c_b + row.to(tl.int64)[:, None] * c_e + column.to(tl.int64)[None, :] * c_d
        total += beta * tl.load(c_at, mask=inside, other=0.0).to(WIDE)
    rounded = total.to(out_ptr.dtype.element_ty)
    out_ptr += matrix * size * size
    if i == j:
        below = (
            row[:, None] >= column[None, :]
        )  # the product of a tile with itself may differ in the last bit across it
        tl.store(out_ptr + row.to(tl.int64)[:, None] * size + column[None, :], rounded, mask=inside & below)
        tl.store(out_ptr + column.to(tl.int64)[None, :] * size + row[:, None], rounded, mask=inside & below)
    else:
        tl.store(out_ptr + row.to(tl.int64)[:, None] * size + column[None, :], rounded, mask=inside)
        tl.store(out_ptr + column.to(tl.int64)[None, :] * size + row[:, None], rounded, mask=inside)
