"""Normalised and rotated heads in Triton: a tile is some heads of one kind of a token, and a program walks over tokens.

The backward writes the whole gradient of the fused projection, that of the values included, and sums the weights'
gradients per program in a fixed order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, resident, summed, warps, wide

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
        rows, columns, threads = _tile(heads, shared, size)
        tiles = (heads + shared) // rows
        programs = min(count, triton.cdiv(resident(qkv, threads), tiles))
        normed = q_weight is not None
        q_weight, k_weight = (qkv if w is None else w for w in (q_weight, k_weight))
        with on_device_of(qkv):
            _forward_kernel[(programs, tiles)](
                qkv, q_weight, k_weight, cos, sin, q, k, count, programs, size // 2, *qkv.stride(),
                q_weight.stride(0), k_weight.stride(0), *cos.stride(), *sin.stride(),
                H=heads, K=shared, EPS=eps, NORMED=normed, WIDE=wide(qkv),
                TAKEN=rows, ROWS=triton.next_power_of_2(rows), COLUMNS=columns, num_warps=threads, **ROUNDING,
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
    tile, columns, threads = _tile(heads, shared, size)
    threads *= 2  # it holds twice as much
    tiles = rows // tile
    programs = max(1, min(count, triton.cdiv(resident(qkv, threads), tiles)))
    partial_dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    turned = (heads + shared) // tile if normed else 0
    partial = torch.empty(turned, programs, size, dtype=partial_dtype, device=qkv.device)
    some_q, some_k, some_v = (qkv if x is None else x for x in (q_weight, k_weight, dv))
    if dqkv.numel():
        with on_device_of(qkv):
            _backward_kernel[(programs, tiles)](
                dq, dk, some_v, qkv, some_q, some_k, cos, sin, dqkv, partial, count, programs, size // 2,
                *dq.stride(), *dk.stride(), *some_v.stride(), *qkv.stride(),
                some_q.stride(0), some_k.stride(0), *cos.stride(), *sin.stride(),
                H=heads, K=shared, EPS=eps, NORMED=normed, VALUES=dv is not None, WIDE=wide(qkv),
                TAKEN=tile, ROWS=triton.next_power_of_2(tile), COLUMNS=columns,
                num_warps=threads, **ROUNDING,
            )  # fmt: skip
    else:
        partial.zero_()
    if q_weight is None or k_weight is None:
        return dqkv, qkv.new_empty(0), qkv.new_empty(0)
    for_q, for_k = (x.flatten(0, 1) for x in partial.split((heads // tile, shared // tile)))
    return dqkv, summed(for_q, q_weight.dtype), summed(for_k, k_weight.dtype)


def _tile(heads: int, shared: int, size: int) -> tuple[int, int, int]:
    """(heads, columns of half a head, warps) of a tile, whose heads are all queries or all keys."""
    common = math.gcd(heads, shared)
    taken = max(n for n in range(1, min(common, HEADS) + 1) if common % n == 0)
    columns = triton.next_power_of_2(size // 2)
    return taken, columns, warps(2 * triton.next_power_of_2(taken) * columns)


@triton.jit
def _forward_kernel(
    x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, count, programs, half, x_n, x_h, x_d, qw_d, kw_d,
    cos_n, cos_d, sin_n, sin_d,
    H: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * TAKEN
    x_ptr += head * x_h
    if head < H:
        _turn(
            x_ptr, qw_ptr, cos_ptr, sin_ptr, q_ptr + head * (2 * half), count, programs, half, x_n, x_h, x_d, qw_d,
            cos_n, cos_d, sin_n, sin_d, H, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _turn(
            x_ptr, kw_ptr, cos_ptr, sin_ptr, k_ptr + (head - H) * (2 * half), count, programs, half, x_n, x_h, x_d, kw_d,
            cos_n, cos_d, sin_n, sin_d, K, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _turn(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, count, programs, half, x_n, x_h, x_d, w_d, cos_n, cos_d, sin_n, sin_d,
    ALL: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some heads of one kind, of which a token has `ALL`, of the tokens of a program."""
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    within = column < half
    inside = (row < TAKEN) & within[None, :]
    if NORMED:
        w_first = tl.load(w_ptr + column * w_d, mask=within, other=0.0).to(WIDE)[None, :]
        w_second = tl.load(w_ptr + (column + half) * w_d, mask=within, other=0.0).to(WIDE)[None, :]
    token = tl.program_id(0).to(tl.int64)
    while token < count:
        at = x_ptr + token * x_n + row * x_h + (column * x_d)[None, :]
        first = tl.load(at, mask=inside, other=0.0).to(WIDE)
        second = tl.load(at + half * x_d, mask=inside, other=0.0).to(WIDE)
        cos = tl.load(cos_ptr + token * cos_n + column * cos_d, mask=within, other=0.0).to(NARROW).to(WIDE)[None, :]
        sin = tl.load(sin_ptr + token * sin_n + column * sin_d, mask=within, other=0.0).to(NARROW).to(WIDE)[None, :]
        if NORMED:
            square = tl.sum(first * first + second * second, axis=1)
            reciprocal = tl.rsqrt(square / (2 * half) + EPS)[:, None]
            first = ((first * reciprocal).to(NARROW).to(WIDE) * w_first).to(NARROW).to(WIDE)
            second = ((second * reciprocal).to(NARROW).to(WIDE) * w_second).to(NARROW).to(WIDE)
        y_first = (first * cos).to(NARROW).to(WIDE) - (second * sin).to(NARROW).to(WIDE)
        y_second = (second * cos).to(NARROW).to(WIDE) + (first * sin).to(NARROW).to(WIDE)
        y_at = y_ptr + token * (ALL * 2 * half) + row * (2 * half) + column[None, :]
        tl.store(y_at, y_first.to(NARROW), mask=inside)
        tl.store(y_at + half, y_second.to(NARROW), mask=inside)
        token += programs


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
    dq_n, dq_h, dq_d, dk_n, dk_h, dk_d, dv_n, dv_h, dv_d, x_n, x_h, x_d, qw_d, kw_d, cos_n, cos_d, sin_n, sin_d,
    H: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
            H + 2 * K, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS,
        )  # fmt: skip
    elif head < H + K:
        _pull(
            dk_ptr + (head - H) * dk_h, x_ptr, kw_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
            dk_n, dk_h, dk_d, x_n, x_h, x_d, kw_d, cos_n, cos_d, sin_n, sin_d,
            H + 2 * K, EPS, NORMED, WIDE, TAKEN, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _carry(
            dv_ptr + (head - H - K) * dv_h, dx_ptr, count, programs, half, dv_n, dv_h, dv_d,
            H + 2 * K, VALUES, TAKEN, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _pull(
    d_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, count, programs, half,
    d_n, d_h, d_d, x_n, x_h, x_d, w_d, cos_n, cos_d, sin_n, sin_d,
    ALL: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The cotangents of some heads of one kind, and the sum of a program for their weight."""
    NARROW: tl.constexpr = dx_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    within = column < half
    inside = (row < TAKEN) & within[None, :]
    if NORMED:
        w_first = tl.load(w_ptr + column * w_d, mask=within, other=0.0).to(WIDE)[None, :]
        w_second = tl.load(w_ptr + (column + half) * w_d, mask=within, other=0.0).to(WIDE)[None, :]
        dw_first = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
        dw_second = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    token = tl.program_id(0).to(tl.int64)
    while token < count:
        d_at = d_ptr + token * d_n + row * d_h + (column * d_d)[None, :]
        d_first = tl.load(d_at, mask=inside, other=0.0).to(WIDE)
        d_second = tl.load(d_at + half * d_d, mask=inside, other=0.0).to(WIDE)
        cos = tl.load(cos_ptr + token * cos_n + column * cos_d, mask=within, other=0.0).to(NARROW).to(WIDE)[None, :]
        sin = tl.load(sin_ptr + token * sin_n + column * sin_d, mask=within, other=0.0).to(NARROW).to(WIDE)[None, :]
        g_first = d_first * cos + d_second * sin
        g_second = d_second * cos - d_first * sin
        if NORMED:
            at = x_ptr + token * x_n + row * x_h + (column * x_d)[None, :]
            x_first = tl.load(at, mask=inside, other=0.0).to(WIDE)
            x_second = tl.load(at + half * x_d, mask=inside, other=0.0).to(WIDE)
            square = tl.sum(x_first * x_first + x_second * x_second, axis=1)
            reciprocal = tl.rsqrt(square / (2 * half) + EPS)[:, None]
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
        tl.store(dx_at, g_first.to(NARROW), mask=inside)
        tl.store(dx_at + half, g_second.to(NARROW), mask=inside)
        token += programs
    if NORMED:
        tl.store(partial_ptr + column, tl.sum(dw_first, axis=0), mask=within)
        tl.store(partial_ptr + half + column, tl.sum(dw_second, axis=0), mask=within)


@triton.jit
def _carry(
    d_ptr, dx_ptr, count, programs, half, d_n, d_h, d_d,
    ALL: tl.constexpr, VALUES: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The cotangents of some heads of the values as they are, or zeros."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 2 * COLUMNS)
    inside = (row < TAKEN) & (column < 2 * half)[None, :]
    token = tl.program_id(0).to(tl.int64)
    while token < count:
        d = tl.zeros([ROWS, 2 * COLUMNS], dtype=dx_ptr.dtype.element_ty)
        if VALUES:
            d = tl.load(d_ptr + token * d_n + row * d_h + (column * d_d)[None, :], mask=inside, other=0.0)
        tl.store(dx_ptr + token * (ALL * 2 * half) + row * (2 * half) + column[None, :], d, mask=inside)
        token += programs
