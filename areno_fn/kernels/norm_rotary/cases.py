"""Cases of `norm_rotary`. Sizes are (N, K, head_dim / 2), with two query heads for each key head.

The variant says whether the heads are normalised.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from areno_fn.kernels.law import Arguments, Case, Cases, Floor, coarser, size_of
from areno_fn.kernels.norm_rotary import norm_rotary

EPS = 1e-6


def build(case: Case, device: torch.device | str) -> Arguments:
    """A projection [N, 4 K, head_dim], two weights near 1 or none, and the cosines and sines of any angles."""
    count, shared, half = case.sizes
    qkv = case.normal("qkv", count, 4 * shared, 2 * half, device=device) * case.magnitude
    angles = case.normal("angles", count, half, device=device, dtype=torch.float64) * 3
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    cos, sin = (case.lay(x.to(dtype)) for x in (angles.cos(), angles.sin()))
    if case.variant == "rotated":
        return Arguments(positional=(case.lay(qkv), None, None, cos, sin, 2 * shared, EPS), moving=(0,))
    q_weight, k_weight = (case.lay(case.normal(name, 2 * half, device=device) * 0.1 + 1) for name in ("q", "k"))
    return Arguments(positional=(case.lay(qkv), q_weight, k_weight, cos, sin, 2 * shared, EPS), moving=(0, 1, 2))


def oracle(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, as a product of complex numbers."""
    shared = (qkv.shape[1] - heads) // 2
    turn = torch.complex(cos, sin).unsqueeze(-2)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
        y = torch.complex(*(half.contiguous() for half in x.chunk(2, dim=-1))) * turn
        return torch.cat((y.real, y.imag), dim=-1)

    return turned(qkv[:, :heads], q_weight), turned(qkv[:, heads : heads + shared], k_weight)


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """The gradient of the projection is a difference, those of the weights are sums over heads."""
    qkv, q_weight, k_weight, _, _, heads, eps = arguments.positional
    if q_weight is None:
        return 0.0, 0.0, 0.0
    shared = (qkv.shape[1] - heads) // 2
    sizes = [0.0, 0.0, 0.0]
    for i, (x, weight, dy) in enumerate(
        zip((qkv[:, :heads], qkv[:, heads : heads + shared]), (q_weight, k_weight), cotangents, strict=True)
    ):
        reciprocal = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        reach = dy.square().add(dy.roll(dy.shape[-1] // 2, -1).square()).sqrt()
        sizes[0] = max(sizes[0], size_of(reach * weight * reciprocal))
        sizes[i + 1] = size_of((reach * x * reciprocal).abs().flatten(0, 1).sum(0))
    return 0.0, 0.0, *sizes


def forward_floor(case: Case) -> Floor:
    """Reads queries, keys and angles, writes queries and keys."""
    count, shared, half = case.sizes
    elements = count * 3 * shared * 2 * half
    return Floor(bytes=2 * elements * case.dtype.itemsize + 8 * count * half, flops=7 * elements)


def backward_floor(case: Case) -> Floor:
    """Reads queries, keys, their cotangents and the angles, writes the gradient of all heads."""
    count, shared, half = case.sizes
    elements = count * 3 * shared * 2 * half
    written = count * 4 * shared * 2 * half
    return Floor(bytes=(2 * elements + written) * case.dtype.itemsize + 8 * count * half, flops=14 * elements)


CASES = Cases(
    name="norm_rotary",
    function=norm_rotary,
    oracle=oracle,
    answered=(0, 1),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 40)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 1e2]),
        variant=st.sampled_from(["normed", "rotated"]),
        seed=st.integers(0, 9),
    ),
    wide=(
        Case(sizes=(2, 10, 64), dtype=torch.float32, variant="normed", strided=True),
        Case(sizes=(2, 1, 700), dtype=torch.bfloat16, variant="normed"),
        Case(sizes=(19, 3, 4), dtype=torch.bfloat16, variant="rotated"),
    ),
    hot=(
        Case(sizes=(16384, 8, 64), dtype=torch.bfloat16, variant="normed"),
        Case(sizes=(16384, 8, 64), dtype=torch.bfloat16, variant="rotated"),
    ),
    tolerance=coarser,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)
