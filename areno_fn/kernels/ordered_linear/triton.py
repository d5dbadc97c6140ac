"""The affine map in Triton: an element is a sum over the columns of `x` in one order, whatever the number of rows.

A tile of the result belongs to one program, which goes over all of D in steps of the tensor cores, so a tile's size decides
about speed alone. There is no split of D over programs, which is what makes other libraries' sums depend on the shape. Whether
tiles are read by descriptors, which the memory unit of a GPU follows by itself, or by addresses decides about speed alone too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from areno_fn.kernels.backend import require
from areno_fn.kernels.launch import on_device_of, resident


class Tile(NamedTuple):
    """Rows and columns of the result that a program makes, the columns of x it takes at once, and how it runs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


SMALL = (Tile(64, 128, 128, 4, 4), Tile(64, 64, 64, 4, 4), Tile(64, 32, 256, 4, 3))
"""Widest first. All have at least 64 rows, which is what warp groups multiply together."""
LARGE = Tile(128, 256, 64, 8, 3)
BY_ADDRESS = Tile(64, 128, 64, 4, 4)
_FEW = 112
"""Tiles with which most processors of an H200 have one."""
_MANY = 264
"""Tiles with which every processor has two, so that it can read the next one while it writes the last."""
_GROUP = 8  # tiles of rows that are made side by side, so that they find the weight in the cache


def tile_of(rows: int, columns: int) -> Tile:
    """The tile for a result of that size: as large as leaves something for all processors."""
    for least, tile in ((_MANY, LARGE), *((_FEW, tile) for tile in SMALL)):
        if triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= least:
            return tile
    return SMALL[-1]


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The rows [..., E], contiguous."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    require(low or not x.is_cuda, "ordered_linear", "on the GPU x must be bfloat16 or float16", x)
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    written = out.view(-1, weight.shape[0])
    if not out.numel():
        return out
    if all(map(even, (rows, weight, written))):
        described(rows, weight, bias, written, tile_of(*written.shape))
    else:
        by_address(rows, weight, bias, written, BY_ADDRESS)
    return out


def even(x: torch.Tensor) -> bool:
    """Whether a descriptor can stand for a matrix: rows are contiguous and begin at multiples of 16 bytes."""
    apart = x.stride(0) * x.itemsize
    whole = x.stride(1) == 1 and apart % 16 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) >= x.shape[1]
    return whole and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0))


def described(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """Writes `x weight^T + bias` to `out`, tiles of which are read and written by descriptors; returns it."""
    (count, depth), columns = x.shape, weight.shape[0]
    tiles = triton.cdiv(count, tile.rows) * triton.cdiv(columns, tile.columns)
    halves = 2 if tile == LARGE else 1  # a wide tile is written in two, which leaves more memory for those to come
    boxes = ((x, tile.rows, tile.depth), (weight, tile.columns, tile.depth), (out, tile.rows, tile.columns // halves))
    with on_device_of(x):
        programs = min(tiles, resident(x, tile.warps, tile.warps)) if tile == LARGE else tiles
        _described_kernel[(programs,)](
            *(TensorDescriptor.from_tensor(matrix, [tall, wide]) for matrix, tall, wide in boxes),
            weight if bias is None else bias, count, columns, depth, 1 if bias is None else bias.stride(0),
            BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=_GROUP,
            HALVES=halves, WALKS=tile == LARGE, NARROW=x.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def by_address(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """Writes `x weight^T + bias` to the contiguous matrix `out`, of matrices with any strides; returns it."""
    (count, depth), columns = x.shape, weight.shape[0]
    programs = triton.cdiv(count, tile.rows) * triton.cdiv(columns, tile.columns)
    with on_device_of(x):
        _address_kernel[(programs,)](
            x, weight, weight if bias is None else bias, out, count, columns, depth, *x.stride(), *weight.stride(),
            1 if bias is None else bias.stride(0), BIAS=bias is not None, EVEN=depth % tile.depth == 0,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=_GROUP, NARROW=x.is_cuda,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def corner(number, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The first row and the first column of a tile."""
    tall = tl.cdiv(count, ROWS)
    across = tl.cdiv(columns, COLUMNS)
    first = number // (GROUP * across) * GROUP
    beside = tl.minimum(tall - first, GROUP)
    within = number % (GROUP * across)
    return (first + within % beside) * ROWS, within // beside * COLUMNS


@triton.jit
def _with_bias(total, b_ptr, column, columns, b_e, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(b_ptr + column * b_e, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["count"])
def _described_kernel(
    x_box, w_box, y_box, b_ptr, count, columns, depth, b_e,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, WALKS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    # the interpreter would multiply the bits of bfloat16 as if they were integers
    EXACT: tl.constexpr = x_box.dtype if NARROW else tl.float32
    tiles = tl.cdiv(count, ROWS) * tl.cdiv(columns, COLUMNS)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=WALKS):
        row, column = corner(number, count, columns, ROWS, COLUMNS, GROUP)
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            x = x_box.load([row, start])
            w = w_box.load([column, start])
            total = tl.dot(x.to(EXACT), tl.trans(w.to(EXACT)), total, input_precision="ieee")
        total = _with_bias(total, b_ptr, column + tl.arange(0, COLUMNS), columns, b_e, BIAS)
        if HALVES == 2:
            parts = tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
            left, right = tl.split(parts)
            y_box.store([row, column], left.to(y_box.dtype))
            y_box.store([row, column + COLUMNS // 2], right.to(y_box.dtype))
        else:
            y_box.store([row, column], total.to(y_box.dtype))


@triton.jit(do_not_specialize=["count"])
def _address_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, count, columns, depth, x_n, x_d, w_e, w_d, b_e,
    BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty if NARROW else tl.float32
    row, column = corner(tl.program_id(0), count, columns, ROWS, COLUMNS, GROUP)
    row += tl.arange(0, ROWS)
    column += tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # what lies outside is read from the first row and thrown away
    x_at = x_ptr + tl.where(row < count, row, 0).to(tl.int64)[:, None] * x_n + step[None, :] * x_d
    w_at = w_ptr + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * w_e + step[None, :] * w_d
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
    total = _with_bias(total, b_ptr, column, columns, b_e, BIAS)
    inside = (row < count)[:, None] & (column < columns)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=inside)
