"""Cases of `linear_token_logp`. Sizes are (M, D, V). The variant is the factor of the logits."""

from __future__ import annotations

import math
from functools import partial

import attrs
import torch
from hypothesis import strategies as st

from areno_fn import random
from areno_fn.contracts.key import Key
from areno_fn.kernels.law import Arguments, Case, Cases, Floor, size_of
from areno_fn.kernels.linear_token_logp import linear_token_logp

SCALES = {"plain": 1.0, "cold": 4.0, "warm": 0.5, "turned": -0.7}


def build(case: Case, device: torch.device | str) -> Arguments:
    """Hidden states [M, D] and a head [V, D] whose logits have a deviation of `magnitude`, and the targets [M]."""
    count, width, size = case.sizes
    hidden = case.normal("hidden", count, width, device=device)
    weight = case.normal("weight", size, width, device=device) * (case.magnitude / width**0.5)
    targets = (random.uniform(Key.of(case.seed).fold("targets"), torch.arange(count)) * size).long().to(device)
    positional = (case.lay(hidden), case.lay(weight), targets, SCALES.get(case.variant, 1.0))
    # small cases have several parts all the same
    keywords = {} if size > 10_000 else {"chunk": 1024 * max(count, 1)}
    return Arguments(positional=positional, moving=(0, 1), keywords=keywords)


def oracle(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, chunk: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, over a thousand rows at a time so that a hot case fits into memory."""
    del chunk
    logps, entropies = [], []
    for h, t in zip(hidden.split(1024), targets.split(1024), strict=True):
        logp = (h @ weight.t() * scale).log_softmax(-1)
        entropies.append(-(logp.detach().exp() * logp.detach()).sum(-1))
        logps.append(logp.gather(1, t.unsqueeze(1)).squeeze(1))
    return torch.cat(logps), torch.cat(entropies)


def entropic_oracle(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, chunk: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, of which the entropy has a gradient too."""
    del chunk
    logp = (hidden @ weight.t() * scale).log_softmax(-1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(-1)


def tolerance(inputs: torch.dtype, result: torch.dtype) -> float:
    """Logits are rounded to the dtype of the inputs, and so are their cotangents before they are multiplied."""
    return 4 * max(torch.finfo(inputs).eps, torch.finfo(result).eps)


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """A logit is rounded relative to its own size, and every cotangent carries the rounding of its probability."""
    hidden, weight, _, scale = arguments.positional
    dlogp, *others = cotangents
    if not len(hidden):
        return 0.0, 0.0, 0.0, 0.0
    row = weight.square().sum(1).mean().sqrt().item()
    logits = abs(scale) * hidden.square().mean().sqrt().item() * row
    # the slope of an entropy is p_j (log p_j + H), of terms that are at most about as large as these
    besides = sum(size_of(x) * (1 + math.log(len(weight)) + logits) for x in others)
    slope = abs(scale) * (size_of(dlogp) + besides)
    into_hidden = slope * weight.abs().amax().item() * (1 + logits)
    into_weight = slope * hidden.square().mean().sqrt().item() * (1 + logits) * (len(hidden) / len(weight)) ** 0.5
    return 1 + logits, 1 + 4 * logits, into_hidden, into_weight


def forward_floor(case: Case) -> Floor:
    """Reads the hidden states and the head once, writes two numbers a row."""
    count, width, size = case.sizes
    return Floor(bytes=(count + size) * width * case.dtype.itemsize + count * 16, flops=2 * count * width * size)


def backward_floor(case: Case) -> Floor:
    """Reads both and writes both gradients: two products, three where no logit was kept."""
    count, width, size = case.sizes
    return Floor(bytes=2 * (count + size) * width * case.dtype.itemsize + count * 20, flops=4 * count * width * size)


CASES = Cases(
    name="linear_token_logp",
    function=linear_token_logp,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 5), st.integers(1, 20), st.sampled_from([1, 3, 127, 1024, 1025, 2100])),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 8.0]),
        variant=st.sampled_from(sorted(SCALES)),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(3, 40, 9001), dtype=torch.float32, variant="plain", magnitude=3.0, strided=True),
        Case(sizes=(33, 24, 5000), dtype=torch.bfloat16, variant="warm", magnitude=3.0),
    ),
    hot=(Case(sizes=(4096, 1024, 151936), dtype=torch.bfloat16, variant="plain", magnitude=3.0),),
    tolerance=tolerance,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)

ENTROPIC = attrs.evolve(
    CASES,
    function=partial(linear_token_logp, entropic=True),
    oracle=entropic_oracle,
    answered=(0, 1),
    hot=(Case(sizes=(1000, 1024, 32003), dtype=torch.bfloat16, variant="plain", magnitude=3.0),),
)
"""Those of the entropy with a gradient."""
