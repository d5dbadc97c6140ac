"""`ordered_attention` against the formula in float64, and a query's bits in documents, in pages and in any company.

Triton runs in its interpreter here, with inputs of float32; tests/gpu holds the same laws for tensor cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.attention import PackedLayout, packed_attention, packed_layout
from areno_fn.kernels.backend import BACKENDS
from areno_fn.kernels.ordered_attention import over_pages, packed

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


class Documents(NamedTuple):
    """Documents laid end to end, and the same keys and values in pages; what is in no document is large."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: PackedLayout
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    starts: list[int]


def documents(
    lengths: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Documents:
    source = torch.Generator().manual_seed(sum(lengths))
    count, width = sum(lengths), -(-max(lengths) // page)
    q = torch.randn(count, heads, size, generator=source).to(dtype)
    k, v = torch.randn(count, 2 * kv_heads, size, generator=source).to(dtype).split(kv_heads, 1)
    pages = 1 + len(lengths) * width
    table = (1 + torch.randperm(pages - 1, generator=source)).view(len(lengths), width)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    keys, values = (torch.full((pages, page, kv_heads, size), 1e4, dtype=dtype) for _ in range(2))
    for cache, given_ in ((keys, k), (values, v)):
        cache[table[rows, place // page], place % page] = given_
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    return Documents(q, k, v, packed_layout(rows), keys, values, table, starts)


def formula(made: Documents, scale: float) -> torch.Tensor:
    return packed_attention(made.q.double(), made.k.double(), made.v.double(), made.layout, scale)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got.double() - want).norm()) <= 4 * torch.finfo(got.dtype).eps * float(want.norm())


@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=12, deadline=None)
def fits(lengths: list[int], heads: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    made = documents(lengths, heads=heads[0], kv_heads=heads[1], size=size, dtype=dtype)
    scale = size**-0.5
    whole = packed(made.q, made.k, made.v, made.layout, scale)
    close(whole, formula(made, scale))
    last = torch.tensor([start + length - 1 for start, length in zip(made.starts, lengths, strict=True)])
    got = over_pages(made.q[last], made.keys, made.values, made.table, torch.tensor(lengths), scale)
    close(got, formula(made, scale)[last])


def test_documents_and_pages_are_the_formula(mode: str) -> None:
    fits()


@pytest.mark.interpreted
def test_a_query_has_one_result_in_documents_of_any_company_and_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and packed, read at once and one by one, in rows of either order."""
    monkeypatch.setitem(BACKENDS, "cpu", "triton")
    lengths = [131, 1, 64, 200]
    made = documents(lengths, dtype=torch.bfloat16)
    whole = packed(made.q, made.k, made.v, made.layout, 0.3)
    for start, length in zip(made.starts, lengths, strict=True):
        own = slice(start, start + length)
        alone = packed_layout(torch.zeros(length, dtype=torch.int64))
        assert torch.equal(packed(made.q[own], made.k[own], made.v[own], alone, 0.3), whole[own])
    for seen in (lengths, [1, 1, 1, 1], [64, 1, 64, 64], [65, 1, 63, 129]):
        rows = torch.tensor([start + length - 1 for start, length in zip(made.starts, seen, strict=True)])
        args = made.q[rows], made.keys, made.values, made.table
        got = over_pages(*args, torch.tensor(seen), 0.3)
        assert torch.equal(got, whole[rows])
        turned = (x.flip(0) for x in (args[0], args[3], torch.tensor(seen)))
        q, table, few = turned
        assert torch.equal(over_pages(q, made.keys, made.values, table, few, 0.3).flip(0), got)


@pytest.mark.interpreted
def test_what_is_kept_for_the_backward_is_the_logarithm_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from areno_fn.kernels.ordered_attention import triton

    made = documents([70, 3], heads=2, kv_heads=1)
    sums = triton.packed(made.q, made.k, made.v, made.layout, 0.5)[1]
    assert sums.shape == (2, 73)
    for start, length in ((0, 70), (70, 3)):
        q, k = (x[start : start + length].double() for x in (made.q, made.k))
        scores = 0.5 * torch.einsum("ihd,jd->hij", q, k[:, 0])
        want = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).logsumexp(-1)
        torch.testing.assert_close(sums[:, start : start + length].double(), want, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused(mode: str) -> None:
    made = documents([5, 3])
    with pytest.raises(KernelError, match=r"q must be \[N, H, head_dim\] and k and v \[N, K, head_dim\]"):
        packed(made.q[:7], made.k, made.v, made.layout, 0.5)
    lengths = torch.tensor([5, 3])
    with pytest.raises(KernelError, match=r"q must be \[B, H, head_dim\], keys and values \[P, size, K, head_dim\]"):
        over_pages(made.q[:3], made.keys, made.values, made.table, lengths, 0.5)
    with pytest.raises(KernelError, match="received meta and cpu"):
        over_pages(made.q[:2].to("meta"), made.keys, made.values, made.table, lengths, 0.5)
