"""Cases of `gated_silu`. Sizes are (A, B, I): A x B rows of 2 I."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from areno_fn.kernels.gated_silu import gated_silu
from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser, size_of


def build(case: Case, device: torch.device | str) -> Arguments:
    """The two halves, gate_up [A, B, 2 I]."""
    a, b, size = case.sizes
    gate_up = case.normal("gate_up", a, b, 2 * size, device=device) * case.magnitude
    return Arguments(positional=(case.lay(gate_up),), moving=(0,))


def oracle(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula."""
    size = gate_up.shape[-1] // 2
    return gate_up[..., :size] * gate_up[..., :size].sigmoid() * gate_up[..., size:]


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """The slope of silu crosses 0 near -1.28."""
    (gate_up,), (dy,) = arguments.positional, cotangents
    return 0.0, size_of(dy * gate_up[..., gate_up.shape[-1] // 2 :])


def forward_floor(case: Case) -> Floor:
    """Reads gate and up, writes y."""
    elements = case.sizes[0] * case.sizes[1] * case.sizes[2]
    return Floor(bytes=3 * elements * case.dtype.itemsize, flops=5 * elements)


def backward_floor(case: Case) -> Floor:
    """Reads gate, up and dy, writes both gradients."""
    elements = case.sizes[0] * case.sizes[1] * case.sizes[2]
    return Floor(bytes=5 * elements * case.dtype.itemsize, flops=11 * elements)


CASES = Cases(
    name="gated_silu",
    function=gated_silu,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 70)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 1e2]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(2, 3, 2500), dtype=torch.float32, strided=True),
        Case(sizes=(1, 2, 2048), dtype=torch.bfloat16),
    ),
    hot=(
        Case(sizes=(1, 16384, 3072), dtype=torch.bfloat16),
        Case(sizes=(1, 4096, 12288), dtype=torch.bfloat16),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)
