"""What kernels are given by mistake: refused in words on every device, never an exception of torch's or a wrong number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from areno_fn.contracts.errors import KernelError
from areno_fn.contracts.key import Key
from areno_fn.kernels import lanes, ordered_attention
from areno_fn.kernels.attention import cached_attention, packed_attention, packed_layout
from areno_fn.kernels.backend import BACKENDS
from areno_fn.kernels.linear import linear
from areno_fn.kernels.ordered_linear import ordered_linear
from areno_fn.kernels.paged_attention import paged_attention
from areno_fn.kernels.sample import sample

LAYOUT = packed_layout(torch.tensor([0, 0, 0, 1, 1]))
Q, K = torch.ones(5, 4, 8), torch.ones(5, 2, 8)
ROWS, CACHE, LENGTHS = torch.ones(2, 4, 8), torch.ones(2, 3, 2, 8), torch.tensor([1, 2])
TABLE = torch.tensor([[0, 1], [1, 0]])


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    return packed_attention(q, k, v, LAYOUT, 0.5, **how)


def ordered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ordered_attention.packed(q, k, v, LAYOUT, 0.5)


def paged(**how: Any) -> torch.Tensor:
    return paged_attention(ROWS, CACHE, CACHE, how.pop("table", TABLE), LENGTHS, 0.5, **how)


@pytest.mark.parametrize("attend", [packed, lambda q, k, v: packed(q, k, v, window=2), ordered])
def test_packed_attention_of_what_does_not_fit_together(attend: Callable[..., torch.Tensor]) -> None:
    for q, k, v in (
        (Q, K[:, :0], K[:, :0]),
        (Q, K.bfloat16(), K),
        (Q, K.to("meta"), K),
        (Q.long(), K.long(), K.long()),
    ):
        with pytest.raises(KernelError, match="attention: q must be"):
            attend(q, k, v)


def test_cached_attention_of_what_does_not_fit_together() -> None:
    no_heads = CACHE[:, :, :0]
    for keys in (no_heads, CACHE.bfloat16(), CACHE.to("meta")):
        with pytest.raises(KernelError, match="cached_attention: q must be"):
            cached_attention(ROWS, keys, keys, LENGTHS, 0.5)
    with pytest.raises(KernelError, match="soft_cap not negative"):
        cached_attention(ROWS, CACHE, CACHE, LENGTHS, 0.5, soft_cap=-1.0)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_paged_attention_of_no_places(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", mode)
    for how in ({"longest": 0}, {"longest": -1}, {"table": TABLE[:, :0]}):
        with pytest.raises(KernelError, match="a place at least for every row, longest above 0"):
            paged(**how)


def test_ordered_attention_is_checked_on_the_cpu_as_on_a_gpu() -> None:
    with pytest.raises(KernelError, match="the scale above 0"):
        ordered_attention.packed(Q, K, K, LAYOUT, 0.0)
    with pytest.raises(KernelError, match="the scale above 0"):
        ordered_attention.over_pages(ROWS, CACHE, CACHE, TABLE, LENGTHS, -1.0)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_ordered_linear_of_another_bias_or_of_no_columns(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", mode)
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    for given in ((x, weight, torch.ones(4).bfloat16()), (x[:, :0], weight[:, :0]), (x, weight[:0])):
        with pytest.raises(KernelError, match="of the same dtype with D, E > 0, and bias"):
            ordered_linear(*given)


def test_a_sum_over_nothing_is_the_bias() -> None:
    assert torch.equal(
        linear(torch.ones(3, 0), torch.ones(2, 0), torch.tensor([1.0, 2.0])), torch.tensor([[1.0, 2.0]] * 3)
    )


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 2.0},
        {"top_p": math.nan},
        {"min_p": 2.0},
        {"min_p": -0.1},
    ],
)
def test_rules_of_no_distribution(rule: dict[str, float], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", mode)
    rules: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rule
    with pytest.raises(KernelError, match="must be finite and not negative, the others in"):
        sample(torch.zeros(2, 5), Key.of(0), torch.arange(2), torch.arange(2), **rules)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_pages_of_no_tokens(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", mode)
    with pytest.raises(KernelError, match="size above 0"):
        lanes.next_places(LENGTHS, TABLE, 0)
