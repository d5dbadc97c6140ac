"""`paged_attention` against the formula in float64: the reference here, and Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.law import Case
from areno_fn.kernels.paged_attention import cases, paged_attention, write_pages


def fits(case: Case) -> None:
    positional, keywords = cases.build(case, "cpu")
    before = [x.clone() for x in positional[:5]]
    got = paged_attention(*positional, **keywords)
    want = cases.oracle(*positional, **keywords)
    assert got.dtype == case.dtype and got.shape == want.shape and got.is_contiguous()
    if not want.numel():
        return
    error = (got.double() - want).square().mean().sqrt()
    assert error <= cases.tolerance(case.dtype, got.dtype) * want.square().mean().sqrt()
    assert torch.equal(got, paged_attention(*positional, **keywords)), "the same arguments give the same bits"
    assert all(torch.equal(a, b) for a, b in zip(before, positional[:5], strict=True))


def test_attention_over_pages_is_the_formula(mode: str) -> None:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
    examples = 40 if mode == "reference" else 25
    settings(max_examples=examples, deadline=None, suppress_health_check=health)(given(cases.STRATEGY)(fits))()


@pytest.mark.parametrize("case", cases.WIDE, ids=lambda case: "x".join(map(str, case.sizes)))
def test_it_holds_for_many_parts_and_wide_heads(mode: str, case: Case) -> None:
    fits(case)


def test_a_row_has_the_same_bits_in_any_batch(mode: str) -> None:
    case = Case(sizes=(3, 4, 2, 8, 4, 6, 21), dtype=torch.float32)
    (q, keys, values, table, lengths, scale), _ = cases.build(case, "cpu")
    whole = paged_attention(q, keys, values, table, lengths, scale)
    for row in range(3):
        one = slice(row, row + 1)
        alone = paged_attention(q[one], keys, values, table[one], lengths[one], scale)
        torch.testing.assert_close(alone, whole[one], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_written_to_their_places_and_nowhere_else(mode: str, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 9, 12, generator=source).to(dtype)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    keys, values = (torch.full((5, 4, 3, 12), 9.0, dtype=dtype) for _ in range(2))
    places = torch.tensor([19, 4, 0, 7, 0, 12, 5])
    write_pages(k, v, keys, values, places)
    for source_of, written in ((k, keys), (v, values)):
        flat = written.flatten(0, 1)
        for i in (0, 1, 3, 5, 6):
            assert torch.equal(flat[places[i]], source_of[i])
        assert torch.equal(flat[0], source_of[2]) or torch.equal(flat[0], source_of[4])
        assert int((flat == 9.0).all(-1).all(-1).sum()) == 20 - 6
    with pytest.raises(KernelError, match=r"write_pages: k and v must be \[N, K, head_dim\]"):
        write_pages(k, v[:, :2], keys, values, places)
    write_pages(k[:0], v[:0], keys, values, places[:0])
