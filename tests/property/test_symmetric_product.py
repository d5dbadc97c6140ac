"""The symmetric product against float64: the reference here, and Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.law import Case
from areno_fn.kernels.symmetric_product import cases, symmetric_product
from areno_fn.steps.optimizers.orthogonal import orthogonal, orthogonal_each


def _fits(case: Case) -> None:
    given_, keywords = cases.build(case, "cpu")
    got, want = symmetric_product(*given_, **keywords), cases.oracle(*given_, **keywords)
    assert got.shape == want.shape and got.dtype == case.dtype and got.is_contiguous()
    if got.numel():
        error = (got.double() - want).square().mean().sqrt().item()
        size = want.square().mean().sqrt().item() + cases.noise(*given_, **keywords)
        assert error <= cases.tolerance(case.dtype, got.dtype) * size + torch.finfo(got.dtype).tiny
    again = symmetric_product(*given_, **keywords)
    assert torch.equal(got, again)


def test_it_is_the_formula(mode: str) -> None:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
    settings(max_examples=30, deadline=None, suppress_health_check=health)(given(cases.STRATEGY)(_fits))()


def test_it_is_the_formula_across_tiles_and_symmetric(mode: str) -> None:
    for case in cases.WIDE:
        _fits(case)
        given_, keywords = cases.build(case, "cpu")
        got = symmetric_product(*given_, **keywords)
        if mode == "triton":
            assert torch.equal(got, got.transpose(1, 2))


def test_newton_schulz_of_it_is_that_of_torch(mode: str) -> None:
    """torch.optim.Muon's iterations, in bfloat16."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    for rows, columns in ((24, 40), (40, 24), (16, 16)):
        matrix = Case(sizes=(1,), dtype=torch.float32).normal("m", rows, columns, device="cpu")
        want = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        torch.testing.assert_close(orthogonal(matrix), want, rtol=0, atol=0.02 if mode == "triton" else 0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        KernelError, match=r"symmetric_product: a must be floating \[..., E, D\].*received float32 \[3\]"
    ):
        symmetric_product(torch.ones(3))
    with pytest.raises(KernelError, match=r"received float32 \[2, 3\], float32 \[3, 3\]"):
        symmetric_product(torch.ones(2, 3), torch.ones(3, 3))


def test_a_stack_has_the_factors_of_its_matrices() -> None:
    """As a GPU takes them: matrices of one shape at once, in the order in which they were given."""
    case = Case(sizes=(1,), dtype=torch.float32)
    shapes = ((12, 20), (20, 12), (12, 20), (8, 8), (20, 12))
    matrices = [case.normal(f"m{i}", *shape, device="cpu") for i, shape in enumerate(shapes)]
    alone = [orthogonal(matrix, dtype=torch.float32) for matrix in matrices]
    together = orthogonal_each([matrix.as_subclass(_Elsewhere) for matrix in matrices], dtype=torch.float32)
    for got, want in zip(together, alone, strict=True):
        torch.testing.assert_close(got.as_subclass(torch.Tensor), want, rtol=1e-4, atol=1e-5)


class _Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True
