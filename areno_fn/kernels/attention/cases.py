"""Cases of `packed_attention`. Sizes are (K, H / K, head_dim, length of each document, ..).

The variant says what is seen and how scores are bent: `window 7`, `cap 3`, `window 7 cap 3`, or nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st

from areno_fn.kernels.attention import PackedLayout, packed_attention, packed_layout
from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser, size_of


def build(case: Case, device: torch.device | str) -> Arguments:
    """Queries, keys and values of documents end to end, and their layout."""
    kv_heads, group, size, *lengths = case.sizes
    count = sum(lengths)
    q = case.normal("q", count, kv_heads * group, size, device=device) * case.magnitude
    k, v = (case.normal(name, count, kv_heads, size, device=device) for name in ("k", "v"))
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    layout = packed_layout(segments, (len(lengths), max(lengths)))
    positional = (*(case.lay(x) for x in (q, k, v)), layout, size**-0.5)
    return Arguments(positional=positional, moving=(0, 1, 2), keywords=bounds(case))


def bounds(case: Case) -> dict[str, Any]:
    """The keywords that the variant names."""
    words = case.variant.split()
    named = dict(zip(words[::2], words[1::2], strict=True))
    return {"window": int(named.get("window", 0)), "soft_cap": float(named.get("cap", 0))}


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float, window: int, soft_cap: float
) -> torch.Tensor:
    """The formula, document by document."""
    edges = list(range(0, layout.tokens + 1, layout.longest)) if layout.edges is None else layout.edges.tolist()
    group = q.shape[1] // k.shape[1]
    parts = []
    for begin, end in itertools.pairwise(edges):
        here = slice(begin, end)
        keys, values = (x[here].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[here], keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        place = torch.arange(end - begin, device=q.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or end))
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(parts)


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """Everything is a weighted mean of terms of both signs, and weights are rounded relative to scores."""
    q, k, v, layout, scale = arguments.positional
    (dout,) = cotangents
    if not q.numel():
        return 0.0, 0.0, 0.0, 0.0
    score = scale * size_of(q) * size_of(k) * q.shape[-1] ** 0.5
    slope = size_of(dout) * size_of(v) * q.shape[-1] ** 0.5 * scale
    group = q.shape[1] / k.shape[1]
    spread = (1 + score) * (group * layout.longest) ** 0.5
    return (
        size_of(v) * (1 + score),
        slope * size_of(k) * (1 + score),
        slope * size_of(q) * spread,
        size_of(dout) * spread,
    )


def forward_floor(case: Case) -> Floor:
    """Reads queries, keys and values, writes the result: two products over the pairs that are seen."""
    kv_heads, group, size, *lengths = case.sizes
    moved = sum(lengths) * size * kv_heads * (2 * group + 2) * case.dtype.itemsize
    return Floor(bytes=moved, flops=4 * kv_heads * group * size * _pairs(case))


def backward_floor(case: Case) -> Floor:
    """Reads them, the result and its cotangent, writes three cotangents: five products."""
    kv_heads, group, size, *lengths = case.sizes
    moved = sum(lengths) * size * kv_heads * (4 * group + 4) * case.dtype.itemsize
    return Floor(bytes=moved, flops=10 * kv_heads * group * size * _pairs(case))


def _pairs(case: Case) -> int:
    window = bounds(case)["window"]
    return sum(sum(min(i + 1, window or n) for i in range(n)) for n in case.sizes[3:])


@st.composite
def cases(draw: Any) -> Case:
    """Small cases: ragged documents, grouped queries, every dtype, windows, caps and both."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    window, cap = draw(st.sampled_from([0, 1, 7, 33])), draw(st.sampled_from([0, 0.5, 4, 50]))
    words = [f"window {window}"] * (window > 0) + [f"cap {cap}"] * (cap > 0)
    return Case(
        sizes=(draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 16, 24, 64])), *lengths),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        strided=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 1e-2, 8.0])),
        variant=" ".join(words),
        seed=draw(st.integers(0, 9)),
    )


CASES = Cases(
    name="attention",
    function=packed_attention,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=cases(),
    wide=(
        Case(sizes=(1, 2, 128, 150, 70), dtype=torch.bfloat16, variant="window 50 cap 5"),
        Case(sizes=(2, 1, 96, 131), dtype=torch.float32, variant="cap 5", strided=True),
        Case(sizes=(1, 1, 256, 40, 65), dtype=torch.bfloat16, variant="window 30"),
        # caps far above all scores, whose roundings must not become those of scores
        Case(sizes=(1, 2, 24, 31, 40), dtype=torch.bfloat16, variant="window 33 cap 10000000"),
        Case(sizes=(1, 2, 24, 31, 40), dtype=torch.float16, variant="cap 100000"),
    ),
    hot=(
        Case(sizes=(8, 2, 128, 4096, 3000, 900, 196), dtype=torch.bfloat16, variant="cap 50"),
        Case(sizes=(8, 2, 128, 4096, 4096), dtype=torch.bfloat16, variant="window 1024"),
        Case(sizes=(4, 2, 256, 4096, 2048, 2048), dtype=torch.bfloat16, variant="window 1024 cap 50"),
        Case(sizes=(4, 2, 256, 4096, 2048, 2048), dtype=torch.bfloat16, variant=""),
        Case(sizes=(4, 4, 64, 2048, 2048), dtype=torch.bfloat16, variant="cap 30"),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)
