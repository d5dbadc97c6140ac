"""What the launches of Triton kernels share: tensors as rows, tile sizes, and the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl

ROUNDING = {"enable_fp_fusion": False}
"""Launch option: a product that is added is rounded first, as it is spelled and as the reference does it."""


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [A, B, D]: a view wherever the strides allow one, as for the heads inside a fused projection."""
    return x.reshape(1, 1, -1) if x.ndim == 1 else x.reshape(-1, *x.shape[-2:])


class Lines(NamedTuple):
    """Tensors [A, B, D] of one shape as A x B lines of D.

    Attributes:
        tensors: views.
        rows: how many lines.
        inner: B, by which the number of a line is divided; of no meaning where they are flat.
        flat: in every tensor the lines are equally far apart, so that nothing has to be divided.
    """

    tensors: tuple[torch.Tensor, ...]
    rows: int
    inner: int
    flat: bool


def lines_of(*tensors: torch.Tensor) -> Lines:
    """Tensors [..., D] of one shape as lines; a number of lines is below 2^31, as that of programs is."""
    views = tuple(rows_of(x) for x in tensors)
    a, b, _ = views[0].shape
    flat = a == 1 or all(b == 1 or x.stride(0) == b * x.stride(1) for x in views)
    if flat:  # of one line a block, the lines are as far apart as the blocks
        size = views[0].shape[2]
        step = 0 if b == 1 else 1
        views = tuple(x.as_strided((1, a * b, size), (0, x.stride(step), x.stride(2))) for x in views)
    return Lines(views, a * b, b, flat)


def wide(x: torch.Tensor) -> tl.dtype:
    """The dtype in which sums and products over `x` are formed."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def exact(x: torch.Tensor) -> tl.dtype:
    """The dtype in which tiles of `x` are multiplied: its own, but in the interpreter, where bits of bfloat16 are integers."""
    return type_of(x.dtype) if x.is_cuda else wide(x)


def type_of(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a floating dtype."""
    return {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float64: tl.float64,
    }[dtype]


def tile(size: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a tile that spans a whole row of `size`, with about `elements` in all; powers of two."""
    columns = triton.next_power_of_2(size)
    return max(1, elements // columns), columns


def warps(elements: int) -> int:
    """Warps for a tile of that many elements: 16 elements a thread, between 1 and 16 warps."""
    return min(16, max(1, elements // 512))


def resident(x: torch.Tensor, warps: int, most: int = 32) -> int:
    """How many programs of so many warps run at once on the device of `x`, of which a processor holds `most` warps.

    A program that walks over rows is started so often and no oftener, so that no part of the device waits for a last
    few. 32 warps are held when each thread has some 64 registers.
    """
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    return processors * max(1, most // warps)


class Steps(NamedTuple):
    """How programs walk over lines.

    Attributes:
        rows: lines of a step.
        warps: of a program.
        stages: steps whose loads are under way at once.
        held: warps that a processor is given.
    """

    rows: int
    warps: int
    stages: int
    held: int


def summed(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum [D] of the rows of a contiguous matrix [P, D], in a fixed order, formed in its dtype and rounded to another."""
    count, size = partial.shape
    total = torch.empty(size, dtype=dtype, device=partial.device)
    if size:
        with on_device_of(partial):
            _sum_kernel[(triton.cdiv(size, 32),)](
                partial, total, count, size, WIDE=wide(partial), ROWS=128, COLUMNS=32, num_warps=4, **ROUNDING
            )
    return total


@triton.jit
def places(row, B, outer, inner, FLAT: tl.constexpr):
    """Where lines begin; a division of 64-bit numbers for each would cost more than the line."""
    return row.to(tl.int64) * inner if FLAT else (row // B).to(tl.int64) * outer + (row % B).to(tl.int64) * inner


@triton.jit
def read(at, inside, MASKED: tl.constexpr):
    """What lies there, 0 outside. A load is only as wide as its mask allows, so that a whole tile has none."""
    return tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)


@triton.jit
def write(at, x, inside, MASKED: tl.constexpr):
    """Stores a tile, rounded to the dtype of the memory."""
    if MASKED:
        tl.store(at, x.to(at.dtype.element_ty), mask=inside)
    else:
        tl.store(at, x.to(at.dtype.element_ty))


@triton.jit
def tanh(x):
    """The hyperbolic tangent: a series where the difference of exponentials would cancel."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.04, series, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit
def _sum_kernel(
    partial_ptr, total_ptr, count, size, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < size
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & within[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * size + column[None, :], mask=inside, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, axis=0).to(total_ptr.dtype.element_ty), mask=within)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[None]:
    """Launches go to the current device, which need not be the one that the tensor lies on."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()
