"""Cases of `symmetric_product`. Sizes are (B, E, D): B matrices; the variant says whether a matrix is added."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from areno_fn.kernels.law import Case, Floor, coarser, size_of

ALPHA, BETA = 2.0315, -4.7750


def build(case: Case, device: torch.device | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the function: matrices of deviation `magnitude` over the root of D, and a symmetric one beside."""
    count, size, width = case.sizes
    a = case.lay(case.normal("a", count, size, width, device=device) * (case.magnitude / max(width, 1) ** 0.5))
    if case.variant != "added":
        return (a,), {"alpha": 1.0}
    c = case.normal("c", count, size, size, device=device)
    c = case.lay((c + c.transpose(1, 2)) * 0.5)
    return (a, c), {"alpha": ALPHA, "beta": BETA}


def oracle(a: torch.Tensor, c: torch.Tensor | None = None, *, alpha: float, beta: float = 0.0) -> torch.Tensor:
    """The formula in float64."""
    product = alpha * (a.double() @ a.double().transpose(-1, -2))
    return product if c is None else product + beta * c.double()


def noise(a: torch.Tensor, c: torch.Tensor | None = None, *, alpha: float, beta: float = 0.0) -> float:
    """What is summed may cancel: the size of the terms."""
    size = alpha * a.double().square().sum(-1).mean().item() if a.numel() else 0.0
    return size + (abs(beta) * size_of(c.double()) if c is not None else 0.0)


def floor(case: Case) -> Floor:
    """Reads the matrices, writes the product; half of the product's multiplications."""
    count, size, width = case.sizes
    moved = count * size * (width + (2 if case.variant == "added" else 1) * size) * case.dtype.itemsize
    return Floor(bytes=moved, flops=count * size * (size + 1) * width)


STRATEGY = st.builds(
    Case,
    sizes=st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 40)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strided=st.booleans(),
    magnitude=st.sampled_from([1.0, 1e-3, 30.0]),
    variant=st.sampled_from(["alone", "added"]),
    seed=st.integers(0, 9),
)
WIDE = (
    Case(sizes=(2, 150, 70), dtype=torch.bfloat16, variant="added", strided=True),
    Case(sizes=(1, 70, 133), dtype=torch.float32, variant="alone"),
)
HOT = (
    Case(sizes=(28, 1024, 3072), dtype=torch.bfloat16, variant="alone"),
    Case(sizes=(28, 1024, 1024), dtype=torch.bfloat16, variant="added"),
    Case(sizes=(1, 4096, 4096), dtype=torch.bfloat16, variant="alone"),
)
tolerance = coarser
