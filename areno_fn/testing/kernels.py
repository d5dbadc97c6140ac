"""The law of kernels: a primitive is its formula, differentiated, whatever computes it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Literal

import torch

from areno_fn import tree
from areno_fn.kernels.backend import interpreted
from areno_fn.kernels.law import Case, Cases, against_oracle, answering, cotangents_of, moving_tensors, pulled
from areno_fn.testing.strict import strict

By = Literal["device", "triton"]
"""Who computes: what the device of the arguments chooses, or `triton.py` in Triton's interpreter on the CPU."""


def kernel_agrees(cases: Cases, case: Case, *, device: torch.device | str = "cpu", by: By = "device") -> None:
    """Outputs and gradients of a kernel are those of its formula in float64, up to the roundings that it states.

    Also: torch.func, autograd and a second pull give the same bits, arguments stay as they were, a cotangent without
    memory of its own is read, outputs are new, and contiguous where the arguments are, gradients have the shapes and
    dtypes of their arguments, and an element that nobody wrote is NaN.

    Args:
        cases: the `CASES` of a `cases.py`.
        case: one of `cases.strategy`, `cases.wide` or `cases.hot`.
        device: where the arguments lie.
        by: "triton" runs `triton.py` on CPU tensors, which takes TRITON_INTERPRET=1 in the environment.

    Raises:
        AssertionError: names the kernel, the case, the output or gradient, and how far off it is.
        KernelError: the interpreter was asked for and is not switched on.
    """
    with interpreted() if by == "triton" else nullcontext(), strict():
        fits_formula(cases, case, device)
        same_under_transforms(cases, case, device)
        reads_spread_cotangents(cases, case, device)
        makes_new_results(cases, case, device)


def fits_formula(cases: Cases, case: Case, device: torch.device | str = "cpu") -> None:
    """Every output and gradient is the oracle's, within what rounding explains."""
    for found in against_oracle(cases, case, device):
        if not math.isfinite(found.error):
            raise AssertionError(
                f"{cases.name}, {case}: {found.label} is of another shape, infinite or NaN where its formula is not"
            )
        if not found.fits:
            raise AssertionError(
                f"{cases.name}, {case}: {found.label} is {found.error:.3g} off its formula in float64, and rounding "
                f"explains {found.allowed:.3g}"
            )


def same_under_transforms(cases: Cases, case: Case, device: torch.device | str = "cpu") -> None:
    """torch.func and autograd agree in every bit, twice, on arguments that stay as they were."""
    arguments = cases.build(case, device)
    given = [x for x in arguments.positional if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in given]
    cotangents = cotangents_of(cases, case, arguments)
    outputs, gradients = pulled(cases.function, arguments, cases.answered, cotangents)
    _same(cases, case, given, before, "an argument was written to")
    made: Any = torch.func.vjp(answering(cases, arguments), *moving_tensors(arguments))
    values, pull = made
    wanted = tuple(outputs[i] for i in cases.answered)
    _same(cases, case, values, wanted, "torch.func's outputs are not autograd's")
    _same(cases, case, pull(cotangents), gradients, "torch.func's gradients are not autograd's")
    _same(cases, case, pull(cotangents), gradients, "a second pull gives other gradients")
    _same(cases, case, given, before, "an argument was written to")


def reads_spread_cotangents(cases: Cases, case: Case, device: torch.device | str = "cpu") -> None:
    """A cotangent of stride 0, such as that of a sum, gives what ones in memory give."""
    arguments = cases.build(case, device)
    plain = cotangents_of(cases, case, arguments)
    ones = tuple(torch.ones_like(c) for c in plain)
    spread = tuple(torch.ones((), dtype=c.dtype, device=c.device).expand(c.shape) for c in plain)
    wanted = pulled(cases.function, arguments, cases.answered, ones)
    found = pulled(cases.function, arguments, cases.answered, spread)
    _same(cases, case, found, wanted, "a cotangent of stride 0, that of a sum, is read as another")


def makes_new_results(cases: Cases, case: Case, device: torch.device | str = "cpu") -> None:
    """Outputs and gradients are in memory of their own, gradients shaped and typed as
    arguments; outputs of contiguous arguments are contiguous.
    """
    arguments = cases.build(case, device)
    cotangents = cotangents_of(cases, case, arguments)
    outputs, gradients = pulled(cases.function, arguments, cases.answered, cotangents)
    held = {x.untyped_storage().data_ptr() for x in arguments.positional if isinstance(x, torch.Tensor) and x.numel()}
    for label, results in (("output", outputs), ("gradient", gradients)):
        for i, x in enumerate(results):
            if x.numel() and x.untyped_storage().data_ptr() in held:
                raise AssertionError(
                    f"{cases.name}, {case}: {label} {i} shares memory with an argument; return new memory"
                )
    for i, x in enumerate(outputs):
        if not (case.strided or x.is_contiguous()):
            raise AssertionError(f"{cases.name}, {case}: output {i} has strides {x.stride()}; return a contiguous one")
    for i, got, given in zip(arguments.moving, gradients, moving_tensors(arguments), strict=True):
        if (got.dtype, got.shape) != (given.dtype, given.shape):
            raise AssertionError(
                f"{cases.name}, {case}: the gradient of argument {i} is {got.dtype} {list(got.shape)}, and the argument "
                f"{given.dtype} {list(given.shape)}"
            )


def _same(cases: Cases, case: Case, found: Any, wanted: Any, broken: str) -> None:
    where = tree.first_difference(found, wanted)
    if where is not None:
        raise AssertionError(f"{cases.name}, {case}: {broken}: {where}")
