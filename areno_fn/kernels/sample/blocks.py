"""Drawing among all tokens: a block of tokens by its mass, then a token of the block.

The first kernel reads the logits once and writes the largest one and the mass of every block; it needs no noise. The second
draws with one number for each block and one for each token of the block that was drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from areno_fn.kernels.sample.numbers import better, noise, row_word, scaled


@triton.jit
def block_kernel(
    logits_ptr, peak_ptr, total_ptr, size, blocks, logits_m, logits_v,
    TEMPERATURE: tl.constexpr, LOWEST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The largest logit and the mass relative to it of `BLOCKS` blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    column = (block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    x = scaled(logits_ptr + row * logits_m, column, size, logits_v, TEMPERATURE, WIDE)
    peak = tl.maximum(tl.max(x, axis=1), LOWEST)
    total = tl.sum(tl.exp(x - peak[:, None]), axis=1)
    tl.store(peak_ptr + row * blocks + block, peak, mask=block < blocks)
    tl.store(total_ptr + row * blocks + block, total, mask=block < blocks)


@triton.jit
def draw_kernel(
    logits_ptr, seed_ptr, counter_ptr, ids_ptr, positions_ptr, peak_ptr, total_ptr, tokens_ptr, logp_ptr, kept_ptr,
    size, blocks, logits_m, logits_v, ids_m, positions_m,
    TEMPERATURE: tl.constexpr, LOWEST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Draws a block of a row, and a token of the block."""
    row = tl.program_id(0).to(tl.int64)
    word = row_word(seed_ptr, counter_ptr, ids_ptr, positions_ptr, row, ids_m, positions_m)
    block = tl.arange(0, EVERY).to(tl.int64)
    there = block < blocks
    peak = tl.load(peak_ptr + row * blocks + block, mask=there, other=LOWEST)
    total = tl.load(total_ptr + row * blocks + block, mask=there, other=0.0)
    largest = tl.max(peak, axis=0)
    whole = tl.sum(total * tl.exp(peak - largest), axis=0)
    nothing = tl.full([], -float("inf"), dtype=WIDE)
    start = tl.full([], 0, dtype=tl.int64)
    if TEMPERATURE == 0.0:
        mass = tl.where(there, peak, -float("inf"))
    else:
        mass = tl.where(total == 0, -float("inf"), peak + tl.log(tl.where(total == 0, 1.0, total)))
        mass += noise(word, -1 - block).to(WIDE)
    mass = tl.where(mass == mass, mass, -float("inf"))
    _, chosen = better(mass, block, nothing, start)
    column = chosen * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    x = scaled(logits_ptr + row * logits_m, column, size, logits_v, TEMPERATURE, WIDE)
    score = x
    if TEMPERATURE != 0.0:
        score = x + noise(word, column).to(WIDE)
    _, token = better(score, column, nothing, chosen * BLOCK)
    logit = tl.sum(tl.where(column == token, x, 0.0), axis=0)
    tl.store(tokens_ptr + row, token)
    tl.store(logp_ptr + row, (logit - largest - tl.where(whole == 0, 0.0, tl.log(whole))).to(tl.float32))
    tl.store(kept_ptr + row, tl.zeros([], dtype=tl.int64) + size)
