"""Cases of `paged_attention`. Sizes are (B, H, K, head_dim, page size, W, longest).

The variant is the window, a soft cap, or both: `7`, `cap 3`, `7 cap 3`.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from areno_fn import random
from areno_fn.contracts.key import Key
from areno_fn.kernels.law import Case, Floor, coarser

MOST_SPARE = 3


def build(case: Case, device: torch.device | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the function: rows of ragged lengths whose pages lie in no order; a finite, large value is in the rest."""
    batch, heads, kv_heads, size, page_size, width, longest = case.sizes
    count = 1 + batch * width + MOST_SPARE
    q = case.lay(case.normal("q", batch, heads, size, device=device) * case.magnitude)
    keys, values = (case.normal(name, count, kv_heads, page_size, size, device=device) for name in ("keys", "values"))
    keys, values = (x.transpose(1, 2) if not case.strided else x.transpose(1, 2).contiguous() for x in (keys, values))
    key = Key.of(case.seed).fold("table")
    table = (1 + random.permutation(key, count - 1)[: batch * width]).reshape(batch, width)
    lengths = 1 + (random.uniform(key.fold("lengths"), torch.arange(batch)) * longest).long().clamp_max(longest - 1)
    lengths[:1] = longest
    used = torch.zeros(count, page_size, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        places = torch.arange(length)
        used[table[row, places // page_size], places % page_size] = True
    for cache in (keys, values):
        cache[~used.to(cache.device)] = 1e4
    keywords = {**bounds(case), "longest": longest}
    return (q, keys, values, table.to(device), lengths.to(device), size**-0.5), keywords


def bounds(case: Case) -> dict[str, Any]:
    """The keywords that the variant names."""
    window, _, cap = case.variant.partition("cap")
    return {"window": int(window or 0), "soft_cap": float(cap or 0)}


def oracle(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
    longest: int,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The formula, row by row and head by head, in float64."""
    del longest
    out = torch.empty(q.shape, dtype=torch.float64)
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for row in range(q.shape[0]):
        length = int(lengths[row])
        places = torch.arange(max(0, length - window) if window else 0, length, device=keys.device)
        page, within = table[row, places // size], places % size
        for head in range(q.shape[1]):
            k, v = (x[page, within, head // group].double() for x in (keys, values))
            score = k @ q[row, head].double() * scale
            score = soft_cap * torch.tanh(score / soft_cap) if soft_cap else score
            out[row, head] = score.softmax(0) @ v
    return out


def floor(case: Case, lengths: torch.Tensor) -> Floor:
    """Reads the keys and values that are seen, the queries, the table; writes the result."""
    batch, heads, kv_heads, size, *_ = case.sizes
    window = bounds(case)["window"]
    seen = int((lengths.clamp_max(window) if window else lengths).sum())
    moved = (2 * seen * kv_heads * size + 2 * batch * heads * size) * case.dtype.itemsize
    return Floor(bytes=moved, flops=4 * seen * heads * size)


@st.composite
def cases(draw: Any) -> Case:
    """Small cases: ragged tails, grouped queries, every dtype, windows, empty batches."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    page_size, width = draw(st.sampled_from([1, 2, 5, 16, 32])), draw(st.integers(1, 5))
    longest = draw(st.integers(1, page_size * width))
    size = draw(st.sampled_from([4, 8, 24, 64]))
    return Case(
        sizes=(draw(st.integers(0, 3)), kv_heads * group, kv_heads, size, page_size, width, longest),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        strided=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 1e-2, 20.0])),
        variant=draw(st.sampled_from(["", "", "1", "7", "100", "cap 2", "7 cap 0.5", "cap 50"])),
        seed=draw(st.integers(0, 9)),
    )


STRATEGY = cases()
WIDE = tuple(
    Case(sizes=(2, 2 * group, 2, size, 16, 20, 311), dtype=dtype, variant=window, strided=group == 3)
    for size, group, dtype, window in (
        (64, 1, torch.float32, ""),
        (128, 2, torch.bfloat16, ""),
        (256, 3, torch.float32, "100"),
        (128, 2, torch.bfloat16, "100 cap 5"),
        (96, 17, torch.bfloat16, ""),
    )
)
HOT = (
    Case(sizes=(256, 16, 8, 128, 32, 12, 384), dtype=torch.bfloat16),
    Case(sizes=(256, 32, 8, 128, 32, 64, 2048), dtype=torch.bfloat16),
    Case(sizes=(4, 16, 8, 128, 32, 512, 16384), dtype=torch.bfloat16),
    Case(sizes=(1, 16, 8, 128, 32, 12, 384), dtype=torch.bfloat16),
)
tolerance = coarser
