"""Cases of `sample`. Sizes are (B, V); the variant names the rules, and whether logits are tied or closed."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from areno_fn import random
from areno_fn.contracts.key import Key
from areno_fn.kernels.law import Case, Floor
from areno_fn.kernels.sample.reference import BLOCK

RULES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "warm": {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    "top-k": {"temperature": 0.7, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
    "top-p": {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
    "min-p": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}
SHAPES = ("", " tied", " closed")


def build(case: Case, device: torch.device | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Logits [B, V], a key, ids and positions of any size, and the rules."""
    count, size = case.sizes
    logits = case.normal("logits", count, size, device=device) * case.magnitude
    rules, _, shape = case.variant.partition(" ")
    if shape == "tied":
        logits = logits.round()
    if shape == "closed":
        logits = logits.masked_fill(case.normal("closed", count, size, device=device) > 0.5, -torch.inf)
        logits[:, :1] = 0.0
    key = Key.of(case.seed).fold("draws")
    ids = random.words(key.fold("ids"), torch.arange(count))
    positions = torch.arange(count) * 1000 + case.seed
    on_device = Key(seed=key.seed.to(device), counter=key.counter.to(device))
    return (case.lay(logits), on_device, ids.to(device), positions.to(device)), RULES[rules]


def oracle(
    logits: torch.Tensor, key: Key, ids: torch.Tensor, positions: torch.Tensor, rules: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, set[int]]]:
    """Of every row: its tokens in descending order, logits float64 [V], scores [V] of which the draw is the largest, counts.

    The counts are those of rules whose bounds are off by what rounding explains. Where nothing is cut off the score of a
    token falls short of the largest by what its block lacks, and by what it lacks inside the block.
    """
    lanes = torch.arange(logits.shape[1], device=logits.device)
    plain = rules["temperature"] and not (0 < rules["top_k"] < len(lanes) or rules["top_p"] < 1 or rules["min_p"])
    rows = []
    for row in range(logits.shape[0]):
        x = logits[row].double() / (rules["temperature"] or 1.0)
        order = x.argsort(descending=True, stable=True)
        counts = {x.shape[0]} if rules["temperature"] == 0 else _counts(x[order], rules)
        noise = 0.0 if rules["temperature"] == 0 else random.gumbel(key, ids[row], positions[row], lanes).double()
        score = x + noise
        if plain and len(lanes) > BLOCK:
            blocks = x.split(BLOCK)
            names = -1 - torch.arange(len(blocks), device=x.device)
            masses = torch.stack([block.logsumexp(0) for block in blocks])
            masses = masses + random.gumbel(key, ids[row], positions[row], names).double()
            lacks = [
                mass - masses.max() + part - part.max() for mass, part in zip(masses, score.split(BLOCK), strict=True)
            ]
            score = torch.cat(lacks).nan_to_num(-math.inf) + score[score.isfinite()].max()
        rows.append((order, x, score, counts))
    return rows


def _counts(ordered: torch.Tensor, rules: dict[str, Any]) -> set[int]:
    """How many tokens of a row in descending order may stay."""
    size = ordered.shape[0]
    most = min(rules["top_k"] or size, size)
    head = ordered[:most]
    before = head.softmax(0).cumsum(0) - head.softmax(0)
    counts = set()
    for slack in (-2e-6, 0.0, 2e-6):
        count = most
        if rules["top_p"] < 1:
            count = max(1, int((before < rules["top_p"] + slack).sum()))
        if rules["min_p"] > 0:
            count = min(count, int((head >= head[0] + math.log(rules["min_p"]) + slack).sum()))
        counts.add(max(1, count))
    return set(range(min(counts), max(counts) + 1))


def floor(case: Case) -> Floor:
    """Reads the logits once; an exponential an element."""
    count, size = case.sizes
    return Floor(bytes=count * size * case.dtype.itemsize + count * 40, flops=3 * count * size)


STRATEGY = st.builds(
    Case,
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 90)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    strided=st.booleans(),
    magnitude=st.sampled_from([1.0, 1e-3, 5.0, 1e3]),
    variant=st.sampled_from([rules + shape for rules in RULES for shape in SHAPES]),
    seed=st.integers(0, 9),
)
WIDE = tuple(
    Case(sizes=(2, 9001), dtype=dtype, variant=rules + shape, magnitude=3.0, strided=shape == " tied")
    for dtype, rules, shape in (
        (torch.float32, "plain", ""),
        (torch.bfloat16, "warm", " tied"),
        (torch.bfloat16, "greedy", ""),
        (torch.float32, "all", ""),
        (torch.bfloat16, "top-p", " closed"),
        (torch.float32, "top-k", " tied"),
    )
)
HOT = tuple(
    Case(sizes=sizes, dtype=torch.bfloat16, variant=rules, magnitude=3.0)
    for sizes in ((256, 151936), (8, 151936))
    for rules in ("plain", "all")
)
