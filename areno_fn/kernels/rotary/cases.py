"""Cases of `rotary`. Sizes are (N, H, head_dim / 2).

The variant says how channels are paired and how many are turned: all, or a quarter of them (`partial`).
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser
from areno_fn.kernels.rotary import rotary


def build(case: Case, device: torch.device | str) -> Arguments:
    """Heads x [N, H, head_dim], and the cosines and sines of any angles, float32 [N, head_dim / 2]."""
    positions, heads, half = case.sizes
    x = case.normal("x", positions, heads, 2 * half, device=device) * case.magnitude
    turned = max(1, half // 4) if "partial" in case.variant else half
    angles = case.normal("angles", positions, turned, device=device, dtype=torch.float64) * 3
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positional = (case.lay(x), case.lay(cos), case.lay(sin))
    return Arguments(positional=positional, moving=(0,), keywords={"interleaved": "interleaved" in case.variant})


def oracle(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The formula, as a product of complex numbers."""
    half = cos.shape[-1]
    moved, still = x[..., : 2 * half], x[..., 2 * half :]
    pairs = moved.unflatten(-1, (half, 2) if interleaved else (2, half)).movedim(-1 if interleaved else -2, 0)
    turned = torch.complex(pairs[0].contiguous(), pairs[1].contiguous()) * torch.complex(cos, sin).unsqueeze(-2)
    y = torch.stack((turned.real, turned.imag), dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat((y, still), dim=-1)


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """A rotation keeps lengths."""
    del arguments, cotangents
    return 0.0, 0.0


def floor(case: Case) -> Floor:
    """Reads x, the cosines and the sines, writes y; the backward is the same."""
    positions, heads, half = case.sizes
    elements = positions * heads * 2 * half
    return Floor(bytes=2 * elements * case.dtype.itemsize + 2 * positions * half * 4, flops=3 * elements)


CASES = Cases(
    name="rotary",
    function=rotary,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 1e2]),
        variant=st.sampled_from(["halves", "interleaved", "partial", "interleaved partial"]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(3, 40, 64), dtype=torch.float32, strided=True),
        Case(sizes=(2, 3, 700), dtype=torch.bfloat16),
        Case(sizes=(3, 20, 128), dtype=torch.bfloat16, variant="interleaved partial", strided=True),
    ),
    hot=(
        Case(sizes=(16384, 16, 64), dtype=torch.bfloat16),
        Case(sizes=(16384, 8, 64), dtype=torch.bfloat16),
        Case(sizes=(16384, 16, 64), dtype=torch.bfloat16, variant="interleaved"),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=floor,
    backward_floor=floor,
)
