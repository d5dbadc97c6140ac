"""Heads of one token, normalised and rotated, or copied, in Triton: a tile is some heads of one kind.

Rounded where `norm_rotary` rounds. A decoding step has few tokens, so that a program has a single one of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, warps, wide
from areno_fn.kernels.norm_rotary.triton import heads_at_once, normalised
from areno_fn.kernels.rotary.triton import of_angles, turned


def forward(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries, contiguous."""
    count, rows, size = qkv.shape
    shared = (rows - heads) // 2
    q = torch.empty(count, heads, size, dtype=qkv.dtype, device=qkv.device)
    if not q.numel():
        return q
    taken = heads_at_once(heads, shared)
    tile, columns = triton.next_power_of_2(taken), triton.next_power_of_2(size // 2)
    some_q, some_k = (qkv if w is None else w for w in (q_weight, k_weight))
    with on_device_of(qkv):
        _kernel[(count, rows // taken)](
            qkv, some_q, some_k, cos, sin, q, keys, values, places, size // 2, keys.shape[1], *qkv.stride(),
            some_q.stride(-1), some_k.stride(-1), *cos.stride(), *sin.stride(), *keys.stride(), *values.stride(),
            places.stride(0), H=heads, K=shared, EPS=eps, NORMED=q_weight is not None, WIDE=wide(qkv),
            TAKEN=taken, ROWS=tile, COLUMNS=columns, num_warps=warps(2 * tile * columns), **ROUNDING,
        )  # fmt: skip
    return q


@triton.jit
def _kernel(
    x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, q_ptr, keys_ptr, values_ptr, place_ptr, half, page_size, x_n, x_h, x_d,
    qw_d, kw_d, cos_n, cos_d, sin_n, sin_d, keys_p, keys_s, keys_h, keys_d, values_p, values_s, values_h, values_d, place_n,
    H: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TAKEN
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    inside = (row < TAKEN) & (column < half)[None, :]
    x_at = x_ptr + token * x_n + (head + row) * x_h + (column * x_d)[None, :]
    first = tl.load(x_at, mask=inside, other=0.0)
    second = tl.load(x_at + half * x_d, mask=inside, other=0.0)
    place = tl.load(place_ptr + token * place_n)
    page, slot = place // page_size, place % page_size
    if head < H + K:
        cos = of_angles(cos_ptr + token * cos_n, row, (column * cos_d)[None, :], inside, True, NARROW, WIDE)
        sin = of_angles(sin_ptr + token * sin_n, row, (column * sin_d)[None, :], inside, True, NARROW, WIDE)
        if head < H:
            w_at = qw_ptr + row * 0 + (column * qw_d)[None, :]
            first, second = _head(first, second, w_at, half * qw_d, cos, sin, inside, half, EPS, NORMED, WIDE)
            at = q_ptr + (token * H + head + row) * (2 * half) + column[None, :]
            tl.store(at, first, mask=inside)
            tl.store(at + half, second, mask=inside)
        else:
            w_at = kw_ptr + row * 0 + (column * kw_d)[None, :]
            first, second = _head(first, second, w_at, half * kw_d, cos, sin, inside, half, EPS, NORMED, WIDE)
            at = keys_ptr + page * keys_p + slot * keys_s + (head - H + row) * keys_h + (column * keys_d)[None, :]
            tl.store(at, first, mask=inside)
            tl.store(at + half * keys_d, second, mask=inside)
    else:
        at = values_ptr + page * values_p + slot * values_s + (head - H - K + row) * values_h
        at += (column * values_d)[None, :]
        tl.store(at, first, mask=inside)
        tl.store(at + half * values_d, second, mask=inside)


@triton.jit
def _head(
    first, second, w_at, w_half, cos, sin, inside, half, EPS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Both halves of normalised and rotated heads."""
    NARROW: tl.constexpr = first.dtype
    first = first.to(WIDE)
    second = second.to(WIDE)
    if NORMED:
        w_first = tl.load(w_at, mask=inside, other=0.0).to(WIDE)
        w_second = tl.load(w_at + w_half, mask=inside, other=0.0).to(WIDE)
        first, second = normalised(first, second, w_first, w_second, half, EPS, NARROW, WIDE)
    first, second = turned(first, second, cos, sin, NARROW, WIDE)
    return first.to(NARROW), second.to(NARROW)
