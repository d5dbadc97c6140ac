"""Cases of `add_rms_norm`. Sizes are (A, B, D): A x B rows of D; the variant is the meaning of the weight."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from areno_fn.kernels.add_rms_norm import add_rms_norm
from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser, size_of

EPS = 1e-6


def build(case: Case, device: torch.device | str) -> Arguments:
    """Two summands [A, B, D] and the weight [D], near 1, or near 0 when it is stored as the distance from 1."""
    x, residual = (case.normal(name, *case.sizes, device=device) * case.magnitude for name in ("x", "residual"))
    centred = case.variant == "zero centred"
    weight = case.normal("weight", case.sizes[-1], device=device) * 0.1 + (0 if centred else 1)
    positional = (case.lay(x), case.lay(residual), case.lay(weight), EPS)
    return Arguments(positional=positional, moving=(0, 1, 2), keywords={"zero_centred": centred})


def oracle(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula."""
    total = x + residual
    scale = weight + 1 if zero_centred else weight
    return total, total / (total.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """The sum of the summands may cancel, the gradient is a sum of terms of both signs, that in the weight one over rows."""
    x, residual, weight, eps = arguments.positional
    dtotal, dnormal = cotangents
    weight = weight + 1 if arguments.keywords["zero_centred"] else weight
    total = x + residual
    spread = size_of(x) + size_of(residual)
    reciprocal = (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    # a rounding of the summands moves a row that has cancelled by more than a rounding of itself
    relative = 1 + (spread * reciprocal).amax().item() if total.numel() else 1.0
    terms = (dnormal * total * reciprocal).abs().reshape(-1, x.shape[-1]).sum(0)
    into_x = (size_of(dnormal * weight * reciprocal)) * relative + size_of(dtotal)
    return spread, relative, into_x, into_x, size_of(terms) * relative


def forward_floor(case: Case) -> Floor:
    """Reads both summands, writes the sum and y."""
    a, b, d = case.sizes
    return Floor(bytes=(4 * a * b * d + d) * case.dtype.itemsize, flops=5 * a * b * d)


def backward_floor(case: Case) -> Floor:
    """Reads the sum and both cotangents, writes dx, the rows again and the weight's gradient."""
    a, b, d = case.sizes
    return Floor(bytes=(5 * a * b * d + 2 * d) * case.dtype.itemsize, flops=12 * a * b * d)


CASES = Cases(
    name="add_rms_norm",
    function=add_rms_norm,
    oracle=oracle,
    answered=(0, 1),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 70)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 1e2]),
        variant=st.sampled_from(["plain", "zero centred"]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(2, 3, 5000), dtype=torch.float32, strided=True),
        Case(sizes=(7, 900, 3), dtype=torch.bfloat16, variant="zero centred"),
    ),
    hot=(
        Case(sizes=(1, 16384, 1024), dtype=torch.bfloat16),
        Case(sizes=(1, 131072, 1024), dtype=torch.bfloat16),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)
