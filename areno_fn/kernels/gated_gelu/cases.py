"""Cases of `gated_gelu`. Sizes are (A, B, I): A x B rows of 2 I; the variant says whether Phi is approximate."""

from __future__ import annotations

import math

import attrs
import torch
from hypothesis import strategies as st

from areno_fn.kernels.gated_gelu import gated_gelu
from areno_fn.kernels.gated_silu import cases as gated_silu
from areno_fn.kernels.law import Arguments, Case, Cases, coarser, size_of


def build(case: Case, device: torch.device | str) -> Arguments:
    """The two halves, gate_up [A, B, 2 I]."""
    return attrs.evolve(gated_silu.build(case, device), keywords={"approximate": case.variant == "approximate"})


def oracle(gate_up: torch.Tensor, *, approximate: bool) -> torch.Tensor:
    """The formula."""
    gate, up = gate_up.chunk(2, dim=-1)
    if approximate:
        return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """Phi cancels below 0, and its slope crosses 0 near -0.75."""
    (gate_up,), (dy,) = arguments.positional, cotangents
    gate, up = gate_up.chunk(2, dim=-1)
    return size_of(gate * up), size_of(dy * up) + size_of(dy * gate)


CASES = Cases(
    name="gated_gelu",
    function=gated_gelu,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 70)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 30.0]),
        variant=st.sampled_from(["exact", "approximate"]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(2, 3, 2500), dtype=torch.float32, strided=True, variant="approximate"),
        Case(sizes=(1, 2, 2048), dtype=torch.bfloat16, variant="exact"),
    ),
    hot=(
        Case(sizes=(1, 16384, 3072), dtype=torch.bfloat16, variant="approximate"),
        Case(sizes=(1, 16384, 3072), dtype=torch.bfloat16, variant="exact"),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=gated_silu.forward_floor,
    backward_floor=gated_silu.backward_floor,
)
