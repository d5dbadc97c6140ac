"""The affine map in Triton: an element is a sum over the columns of `x` in one order, whatever the number of rows.

A tile of the result belongs to one program, which goes over all of D in steps of the tensor cores, so a tile's size decides
about speed alone. There is no split of D over programs, which is what makes other libraries' sums depend on the shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import on_device_of


class Tile(NamedTuple):
    """Rows and columns of the result that a program makes, the columns of x it takes at once, and how it runs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = ((64, Tile(64, 64, 64, 4, 5)), (512, Tile(64, 128, 64, 4, 4)))
"""The most rows that each tile is taken for. All have at least 64 rows, which is what warp groups multiply together."""
LARGE = Tile(128, 128, 64, 8, 3)
_GROUP = 8  # tiles of rows that are made side by side, so that they find the weight in the cache


def tile_of(rows: int) -> Tile:
    """The tile for so many rows."""
    return next((tile for most, tile in TILES if rows <= most), LARGE)


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The rows [..., E], contiguous."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    require(low or not x.is_cuda, "ordered_linear", "on the GPU x must be bfloat16 or float16", x)
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    return multiply(rows, weight, bias, out.view(-1, weight.shape[0]), tile_of(rows.shape[0])).view(out.shape)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """Writes `x weight^T + bias` to the contiguous matrix `out`, and returns it."""
    (count, depth), columns = x.shape, weight.shape[0]
    if out.numel():
        programs = triton.cdiv(count, tile.rows) * triton.cdiv(columns, tile.columns)
        with on_device_of(x):
            _kernel[(programs,)](
                x, weight, weight if bias is None else bias, out, count, columns, depth, *x.stride(), *weight.stride(),
                1 if bias is None else bias.stride(0), BIAS=bias is not None, EVEN=depth % tile.depth == 0,
                ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=_GROUP, NARROW=x.is_cuda,
                num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, count, columns, depth, x_n, x_d, w_e, w_d, b_e,
    BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tall = tl.cdiv(count, ROWS)
    across = tl.cdiv(columns, COLUMNS)
    first = program // (GROUP * across) * GROUP
    beside = tl.minimum(tall - first, GROUP)
    within = program % (GROUP * across)
    row = (first + within % beside) * ROWS + tl.arange(0, ROWS)
    column = within // beside * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # what lies outside is read from the first row and thrown away
    x_at = x_ptr + tl.where(row < count, row, 0).to(tl.int64)[:, None] * x_n + step[None, :] * x_d
    w_at = w_ptr + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * w_e + step[None, :] * w_d
    # the interpreter would multiply the bits of bfloat16 as if they were integers
    EXACT: tl.constexpr = x_ptr.dtype.element_ty if NARROW else tl.float32
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(start + step < depth)[None, :], other=0.0)
            w = tl.load(w_at, mask=(start + step < depth)[None, :], other=0.0)
        total = tl.dot(x.to(EXACT), tl.trans(w.to(EXACT)), total, input_precision="ieee")
        x_at += DEPTH * x_d
        w_at += DEPTH * w_d
    if BIAS:
        total += tl.load(b_ptr + column * b_e, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < count)[:, None] & (column < columns)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=inside)
