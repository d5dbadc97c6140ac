"""Cases of `rms_norm`. Sizes are (A, B, D): A x B rows of D; the variant is the meaning of the weight, or a gate."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser, size_of
from areno_fn.kernels.rms_norm import rms_norm

EPS = 1e-6


def build(case: Case, device: torch.device | str) -> Arguments:
    """Rows x [A, B, D] and weight [D], near 1, or near 0 when it is stored as the distance from 1."""
    x = case.normal("x", *case.sizes, device=device) * case.magnitude
    centred = case.variant == "zero centred"
    weight = case.normal("weight", case.sizes[-1], device=device) * 0.1 + (0 if centred else 1)
    positional = (case.lay(x), case.lay(weight), EPS)
    if case.variant != "gated":
        return Arguments(positional=positional, moving=(0, 1), keywords={"zero_centred": centred})
    gate = case.lay(case.normal("gate", *case.sizes, device=device) * 2)
    return Arguments(positional=(*positional, gate), moving=(0, 1, 3))


def function(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor | None = None, *, zero_centred: bool = False
) -> torch.Tensor:
    """`rms_norm`, with the gate where a gradient is asked for by position."""
    return rms_norm(x, weight, eps, gate=gate, zero_centred=zero_centred)


def oracle(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor | None = None, *, zero_centred: bool = False
) -> torch.Tensor:
    """The formula."""
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + 1 if zero_centred else weight)
    return y if gate is None else y * gate * gate.sigmoid()


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """The gradient in x is a difference, that in the weight a sum over rows; the slope of silu crosses 0."""
    x, weight, eps, *gates = arguments.positional
    (dy,) = cotangents
    reciprocal = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    scale = weight + 1 if arguments.keywords.get("zero_centred") else weight
    into_gate = [size_of(dy * scale * x * reciprocal) for _ in gates]
    for gate in gates:
        dy = dy * gate * gate.sigmoid()
    terms = (dy * x * reciprocal).abs().reshape(-1, x.shape[-1]).sum(0)
    return 0.0, size_of(dy * scale * reciprocal), size_of(terms), *into_gate


def forward_floor(case: Case) -> Floor:
    """Reads x, writes y: a square, a sum, and two products an element."""
    a, b, d = case.sizes
    return Floor(bytes=(2 * a * b * d + d) * case.dtype.itemsize, flops=4 * a * b * d)


def backward_floor(case: Case) -> Floor:
    """Reads x and dy, writes dx and the weight's gradient."""
    a, b, d = case.sizes
    return Floor(bytes=(3 * a * b * d + 2 * d) * case.dtype.itemsize, flops=11 * a * b * d)


CASES = Cases(
    name="rms_norm",
    function=function,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 70)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 1e2]),
        variant=st.sampled_from(["plain", "zero centred", "gated"]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(2, 3, 5000), dtype=torch.float32, variant="plain", strided=True),
        Case(sizes=(7, 900, 3), dtype=torch.bfloat16, variant="zero centred"),
        Case(sizes=(3, 40, 300), dtype=torch.bfloat16, variant="gated", strided=True),
    ),
    hot=(
        Case(sizes=(1, 131072, 1024), dtype=torch.bfloat16, variant="plain"),
        Case(sizes=(16384, 16, 128), dtype=torch.bfloat16, variant="plain", strided=False),
        Case(sizes=(1, 16384, 4096), dtype=torch.bfloat16, variant="zero centred"),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)
