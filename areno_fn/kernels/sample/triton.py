"""Drawing in Triton: one kernel reads the logits block by block, and another draws from what it has found.

No sums are carried along a row, so that logits are read as fast as memory gives them, and noise is made for a few hundred
numbers of a row alone. `blocks.py` draws among all tokens, `ruled.py` among those that rules leave.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import ROUNDING, on_device_of, wide
from areno_fn.kernels.sample.blocks import block_kernel, draw_kernel
from areno_fn.kernels.sample.reference import BLOCK
from areno_fn.kernels.sample.ruled import ruled_kernel

BLOCKS = 16
"""Blocks that a program of the first kernel reads."""
COLUMNS = 2048
"""Logits that a program looks at together where there are rules."""
ROOM = 1 << 15
"""Most logits of a row that are collected."""


def forward(
    logits: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [B], log-probabilities float32 [B], and how many tokens each was drawn among, int64 [B]."""
    count, size = logits.shape
    device = logits.device
    tokens, kept = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    logp = torch.empty(count, dtype=torch.float32, device=device)
    if not count:
        return tokens, logp, kept
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    blocks = triton.cdiv(size, BLOCK)
    peak, total = (torch.empty(count, blocks, dtype=dtype, device=device) for _ in range(2))
    shared: dict[str, Any] = {
        "TEMPERATURE": float(temperature), "LOWEST": torch.finfo(dtype).min, "WIDE": wide(logits), "BLOCK": BLOCK, **ROUNDING,
    }  # fmt: skip
    given = logits, seed, counter, ids, positions, peak, total
    strides = *logits.stride(), ids.stride(0), positions.stride(0)
    every = triton.next_power_of_2(blocks)
    with on_device_of(logits):
        together = min(BLOCKS, every)
        block_kernel[(count, triton.cdiv(blocks, together))](
            logits, peak, total, size, blocks, *logits.stride(), BLOCKS=together, num_warps=4, **shared
        )
        if temperature > 0 and (0 < top_k < size or top_p < 1 or min_p > 0):
            room = min(size, ROOM)
            some = torch.empty(count, room, dtype=dtype, device=device)
            names = torch.empty(count, room, dtype=torch.int32, device=device)
            ruled_kernel[(count,)](
                *given, some, names, tokens, logp, kept, size, blocks, room, *strides, top_k,
                HAS_K=0 < top_k < size, TOP_P=float(top_p), HAS_MIN=min_p > 0, LOG_MIN=math.log(min_p or 1.0),
                INT=tl.int64 if dtype == torch.float64 else tl.int32, BITS=dtype.itemsize * 8,
                EVERY=every, COLUMNS=max(BLOCK, min(COLUMNS, triton.next_power_of_2(size))), num_warps=8, **shared,
            )  # fmt: skip
        else:
            draw_kernel[(count,)](
                *given, tokens, logp, kept, size, blocks, *strides, EVERY=every, num_warps=4, **shared
            )
    return tokens, logp, kept
