"""Normalised and rotated heads in Triton: a tile is some heads of one kind of a token, and a program walks over tokens.

The backward writes the whole gradient of the fused projection, that of the values included, and sums the weights'
gradients per program in a fixed order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, Steps, on_device_of, read, resident, summed, warps, wide, write
from areno_fn.kernels.rotary.triton import of_angles, turned

HEADS = 8
"""Heads of a tile at most."""


def forward(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, contiguous."""
    count, rows, size = qkv.shape
    shared = (rows - heads) // 2
    q = torch.empty(count, heads, size, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(count, shared, size, dtype=qkv.dtype, device=qkv.device)
    if q.numel():
        normed = q_weight is not None
        step = walk(heads, shared, size)
        rows, columns = step.rows, triton.next_power_of_2(size // 2)
        tiles = (heads + shared) // rows
        programs = min(count, triton.cdiv(resident(qkv, step.warps, step.held), tiles))
        q_weight, k_weight = (qkv if w is None else w for w in (q_weight, k_weight))
        with on_device_of(qkv):
            _forward_kernel[(programs, tiles)](
                qkv, q_weight, k_weight, cos, sin, q, k, count, programs, size // 2, *qkv.stride(),
                q_weight.stride(0), k_weight.stride(0), *cos.stride(), *sin.stride(),
                H=heads, K=shared, EPS=eps, NORMED=normed, WIDE=wide(qkv),
                TAKEN=rows, ROWS=triton.next_power_of_2(rows), COLUMNS=columns, MASKED=_masked(rows, size),
                STAGES=step.stages, num_warps=step.warps, **ROUNDING,
            )  # fmt: skip
    return q, k


def backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor | None,
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangent of qkv, contiguous, and of both weights, empty where there is none."""
    count, rows, size = qkv.shape
    heads, shared = dq.shape[1], dk.shape[1]
    dqkv = torch.empty(count, rows, size, dtype=qkv.dtype, device=qkv.device)
    normed = q_weight is not None
    step = walk(heads, shared, size)
    tile, columns = step.rows, triton.next_power_of_2(size // 2)
    tiles = rows // tile
    programs = max(1, min(count, triton.cdiv(resident(qkv, step.warps, step.held), tiles)))
    weighed = (heads + shared) // tile if normed else 0
    partial = torch.empty(
        weighed, programs, size, dtype=torch.promote_types(qkv.dtype, torch.float32), device=qkv.device
    )
    some_q, some_k, some_v = (qkv if x is None else x for x in (q_weight, k_weight, dv))
    if dqkv.numel():
        with on_device_of(qkv):
            _backward_kernel[(programs, tiles)](
                dq, dk, some_v, qkv, some_q, some_k, cos, sin, dqkv, partial, count, programs, size // 2,
                *dq.stride(), *dk.stride(), *some_v.stride(), *qkv.stride(),
                some_q.stride(0), some_k.stride(0), *cos.stride(), *sin.stride(),
                H=heads, K=shared, EPS=eps, NORMED=normed, VALUES=dv is not None, WIDE=wide(qkv),
                TAKEN=tile, ROWS=triton.next_power_of_2(tile), COLUMNS=columns, MASKED=_masked(tile, size),
                STAGES=step.stages, num_warps=step.warps, **ROUNDING,
            )  # fmt: skip
    else:
        partial.zero_()
    if q_weight is None or k_weight is None:
        return dqkv, qkv.new_empty(0), qkv.new_empty(0)
    for_q, for_k = (x.flatten(0, 1) for x in partial.split((heads // tile, shared // tile)))
    return dqkv, summed(for_q, q_weight.dtype), summed(for_k, k_weight.dtype)


def heads_at_once(heads: int, shared: int) -> int:
    """Heads of a tile, which divide those of the queries and those of the keys."""
    common = math.gcd(heads, shared)
    return max(n for n in range(1, min(common, HEADS) + 1) if common % n == 0)


def walk(heads: int, shared: int, size: int) -> Steps:
    """The steps of a program, whose rows are heads of one kind: all queries or all keys."""
    taken = heads_at_once(heads, shared)
    threads = 2 * warps(2 * triton.next_power_of_2(taken) * triton.next_power_of_2(size // 2))
    # more programs than run at once, because tiles of values are done sooner than those of queries
    return Steps(rows=taken, warps=threads, stages=1, held=48)


def _masked(rows: int, size: int) -> bool:
    """Whether a tile is larger than what it holds."""
    return triton.next_power_of_2(rows) != rows or 2 * triton.next_power_of_2(size // 2) != size


@triton.jit
def _reciprocal(first, second, half, EPS: tl.constexpr):
    """What normalises heads, of which both halves are given."""
    return tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * half) + EPS)[:, None]


@triton.jit
def normalised(first, second, w_first, w_second, half, EPS: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr):
    """Both halves of normalised heads, rounded."""
    reciprocal = _reciprocal(first, second, half, EPS)
    first = ((first * reciprocal).to(NARROW).to(WIDE) * w_first).to(NARROW).to(WIDE)
    second = ((second * reciprocal).to(NARROW).to(WIDE) * w_second).to(NARROW).to(WIDE)
    return first, second


@triton.jit
def _forward_kernel(
    x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, count, programs, half, x_n, x_h, x_d, qw_d, kw_d,
    cos_n, cos_d, sin_n, sin_d,
    H: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * TAKEN
    x_ptr += head * x_h
    if head < H:
        _turn(
            x_ptr, qw_ptr, cos_ptr, sin_ptr, q_ptr + head * (2 * half), count, programs, half, x_n, x_h, x_d, qw_d,
            cos_n, cos_d, sin_n, sin_d, H, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS, MASKED, STAGES,
        )  # fmt: skip
    else:
        _turn(
            x_ptr, kw_ptr, cos_ptr, sin_ptr, k_ptr + (head - H) * (2 * half), count, programs, half, x_n, x_h, x_d, kw_d,
            cos_n, cos_d, sin_n, sin_d, K, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS, MASKED, STAGES,
        )  # fmt: skip


@triton.jit
def _turn(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, count, programs, half, x_n, x_h, x_d, w_d, cos_n, cos_d, sin_n, sin_d,
    ALL: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some heads of one kind, of which a token has `ALL`, of the tokens of a program."""
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    within = column < half
    inside = (row < TAKEN) & within[None, :]
    if NORMED:
        w_first = read(w_ptr + column * w_d, within, MASKED).to(WIDE)[None, :]
        w_second = read(w_ptr + (column + half) * w_d, within, MASKED).to(WIDE)[None, :]
    for number in tl.range(tl.program_id(0), count, programs, num_stages=STAGES):
        token = tl.full([], 0, dtype=tl.int64) + number
        at = x_ptr + token * x_n + row * x_h + (column * x_d)[None, :]
        first = read(at, inside, MASKED).to(WIDE)
        second = read(at + half * x_d, inside, MASKED).to(WIDE)
        cos = of_angles(cos_ptr + token * cos_n, row, (column * cos_d)[None, :], inside, MASKED, NARROW, WIDE)
        sin = of_angles(sin_ptr + token * sin_n, row, (column * sin_d)[None, :], inside, MASKED, NARROW, WIDE)
        if NORMED:
            first, second = normalised(first, second, w_first, w_second, half, EPS, NARROW, WIDE)
        first, second = turned(first, second, cos, sin, NARROW, WIDE)
        y_at = y_ptr + token * (ALL * 2 * half) + row * (2 * half) + column[None, :]
        write(y_at, first, inside, MASKED)
        write(y_at + half, second, inside, MASKED)


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
    dq_n, dq_h, dq_d, dk_n, dk_h, dk_d, dv_n, dv_h, dv_d, x_n, x_h, x_d, qw_d, kw_d, cos_n, cos_d, sin_n, sin_d,
    H: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1).to(tl.int64)
    head = tile * TAKEN
    x_ptr += head * x_h
    dx_ptr += head * (2 * half)
    partial_ptr += (tile * programs + tl.program_id(0)) * (2 * half)
    if head < H:
        _pull(
            dq_ptr + head * dq_h, x_ptr, qw_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
            dq_n, dq_h, dq_d, x_n, x_h, x_d, qw_d, cos_n, cos_d, sin_n, sin_d,
            H + 2 * K, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS, MASKED, STAGES,
        )  # fmt: skip
    elif head < H + K:
        _pull(
            dk_ptr + (head - H) * dk_h, x_ptr, kw_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
            dk_n, dk_h, dk_d, x_n, x_h, x_d, kw_d, cos_n, cos_d, sin_n, sin_d,
            H + 2 * K, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS, MASKED, STAGES,
        )  # fmt: skip
    else:
        _carry(
            dv_ptr + (head - H - K) * dv_h, dx_ptr, count, programs, half, dv_n, dv_h, dv_d,
            H + 2 * K, VALUES, TAKEN, ROWS, COLUMNS, MASKED, STAGES,
        )  # fmt: skip


@triton.jit
def _pull(
    d_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
    d_n, d_h, d_d, x_n, x_h, x_d, w_d, cos_n, cos_d, sin_n, sin_d,
    ALL: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The cotangents of some heads of one kind, and the sum of a program for their weight."""
    NARROW: tl.constexpr = dx_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    within = column < half
    inside = (row < TAKEN) & within[None, :]
    if NORMED:
        w_first = read(w_ptr + column * w_d, within, MASKED).to(WIDE)[None, :]
        w_second = read(w_ptr + (column + half) * w_d, within, MASKED).to(WIDE)[None, :]
        dw_first = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
        dw_second = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for number in tl.range(tl.program_id(0), count, programs, num_stages=STAGES):
        token = tl.full([], 0, dtype=tl.int64) + number
        d_at = d_ptr + token * d_n + row * d_h + (column * d_d)[None, :]
        d_first = read(d_at, inside, MASKED).to(WIDE)
        d_second = read(d_at + half * d_d, inside, MASKED).to(WIDE)
        cos = of_angles(cos_ptr + token * cos_n, row, (column * cos_d)[None, :], inside, MASKED, NARROW, WIDE)
        sin = of_angles(sin_ptr + token * sin_n, row, (column * sin_d)[None, :], inside, MASKED, NARROW, WIDE)
        g_first = d_first * cos + d_second * sin
        g_second = d_second * cos - d_first * sin
        if NORMED:
            at = x_ptr + token * x_n + row * x_h + (column * x_d)[None, :]
            x_first = read(at, inside, MASKED).to(WIDE)
            x_second = read(at + half * x_d, inside, MASKED).to(WIDE)
            reciprocal = _reciprocal(x_first, x_second, half, EPS)
            x_first *= reciprocal
            x_second *= reciprocal
            dw_first += g_first * x_first.to(NARROW).to(WIDE)
            dw_second += g_second * x_second.to(NARROW).to(WIDE)
            g_first *= w_first
            g_second *= w_second
            slope = (tl.sum(g_first * x_first + g_second * x_second, axis=1) / (2 * half))[:, None]
            g_first = reciprocal * (g_first - x_first * slope)
            g_second = reciprocal * (g_second - x_second * slope)
        dx_at = dx_ptr + token * (ALL * 2 * half) + row * (2 * half) + column[None, :]
        write(dx_at, g_first, inside, MASKED)
        write(dx_at + half, g_second, inside, MASKED)
    if NORMED:
        tl.store(partial_ptr + column, tl.sum(dw_first, axis=0), mask=within)
        tl.store(partial_ptr + half + column, tl.sum(dw_second, axis=0), mask=within)


@triton.jit
def _carry(
    d_ptr, dx_ptr, count, programs, half, d_n, d_h, d_d,
    ALL: tl.constexpr, VALUES: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The cotangents of some heads of the values as they are, or zeros."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 2 * COLUMNS)
    inside = (row < TAKEN) & (column < 2 * half)[None, :]
    for number in tl.range(tl.program_id(0), count, programs, num_stages=STAGES):
        token = tl.full([], 0, dtype=tl.int64) + number
        d = tl.zeros([ROWS, 2 * COLUMNS], dtype=dx_ptr.dtype.element_ty)
        if VALUES:
            d = tl.load(d_ptr + token * d_n + row * d_h + (column * d_d)[None, :], mask=inside, other=0.0)
        write(dx_ptr + token * (ALL * 2 * half) + row * (2 * half) + column[None, :], d, inside, MASKED)
