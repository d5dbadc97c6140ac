"""Cases of `ordered_linear`. Sizes are (M, D, E); the variant says whether there is a bias."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser, size_of
from areno_fn.kernels.ordered_linear import ordered_linear


def build(case: Case, device: torch.device | str) -> Arguments:
    """Rows x [M, D], a weight [E, D] that keeps their deviation, and a bias [E] or None."""
    count, depth, columns = case.sizes
    x = case.normal("x", count, depth, device=device) * case.magnitude
    weight = case.normal("weight", columns, depth, device=device) / depth**0.5
    if case.variant != "bias":
        return Arguments(positional=(case.lay(x), case.lay(weight), None), moving=(0, 1))
    bias = case.normal("bias", columns, device=device) * case.magnitude
    return Arguments(positional=(case.lay(x), case.lay(weight), case.lay(bias)), moving=(0, 1, 2))


def oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The formula."""
    return x @ weight.t() if bias is None else x @ weight.t() + bias


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """All are sums of products that may cancel."""
    x, weight, bias = arguments.positional
    (dy,) = cotangents
    into_y = size_of(x) * size_of(weight) * x.shape[1] ** 0.5
    into_x = size_of(dy) * size_of(weight) * weight.shape[0] ** 0.5
    into_weight = size_of(dy) * size_of(x) * x.shape[0] ** 0.5
    into_bias = () if bias is None else (size_of(dy) * x.shape[0] ** 0.5,)
    return into_y, into_x, into_weight, *into_bias


def forward_floor(case: Case) -> Floor:
    """Reads x and the weight, writes y."""
    m, d, e = case.sizes
    return Floor(bytes=(m * d + d * e + m * e) * case.dtype.itemsize, flops=2 * m * d * e)


def backward_floor(case: Case) -> Floor:
    """Reads dy, x and the weight, writes two gradients: two products."""
    m, d, e = case.sizes
    return Floor(bytes=(2 * m * d + 2 * d * e + m * e) * case.dtype.itemsize, flops=4 * m * d * e)


CASES = Cases(
    name="ordered_linear",
    function=ordered_linear,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 9), st.integers(1, 150), st.integers(1, 70)),
        dtype=st.sampled_from([torch.bfloat16, torch.float16]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-2, 1e2]),
        variant=st.sampled_from(["plain", "bias"]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(70, 200, 150), dtype=torch.bfloat16, variant="bias"),
        Case(sizes=(600, 136, 130), dtype=torch.float16, variant="plain", strided=True),
    ),
    hot=(
        Case(sizes=(16384, 1024, 6144), dtype=torch.bfloat16, variant="plain"),
        Case(sizes=(256, 3072, 1024), dtype=torch.bfloat16, variant="plain"),
        Case(sizes=(441, 1024, 151936), dtype=torch.bfloat16, variant="plain"),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)
