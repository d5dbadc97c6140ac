"""Scoring through the head by parts of the vocabulary, where a GPU does it, against scoring through whole logits."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from toy_policy import Bigram

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.models.decoder import Decoder, DecoderConfig, init
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.token import head
from areno_fn.steps.token.head import decision_log_probs

CONFIG = DecoderConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    initializer_range=0.5,
)  # fmt: skip
ROWS = 9
LIMIT = 2 * CONFIG.vocab_size
TARGETS = torch.arange(ROWS) * 5 % CONFIG.vocab_size


@pytest.fixture
def by_parts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Takes the way of a GPU, and writes down the factors that the kernel was called with."""
    factors: list[float] = []
    kernel = head.linear_token_logp

    def watched(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, **keywords: Any
    ) -> Any:
        factors.append(scale)
        return kernel(hidden, weight, targets, scale, **keywords)

    monkeypatch.setattr(head, "linear_token_logp", watched)
    monkeypatch.setattr(head, "in_parts", lambda hidden, matrix: hidden.dtype == matrix.dtype)
    return factors


def loss_of(sampling: Sampling, limit: int, kept: torch.Tensor | None = None) -> Any:
    def loss(moving: tuple[Decoder, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        params, hidden = moving
        policy = DecoderPolicy(CONFIG)
        logp, entropy = decision_log_probs(policy, sampling, params, hidden, TARGETS, kept, max_logits=limit)
        return (logp * torch.linspace(-1, 2, ROWS)).sum(), entropy

    return loss


def inputs(tied: bool) -> tuple[Decoder, torch.Tensor]:
    config = attrs.evolve(CONFIG, tie_embeddings=tied)
    return init(config, Key.of(2)), torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_values_and_gradients_are_those_of_whole_logits(tied: bool, temperature: float, by_parts: list[float]) -> None:
    given, sampling = inputs(tied), Sampling(temperature=temperature)
    want = value_and_grad(loss_of(sampling, 10**9), has_aux=True)(given)
    assert by_parts == []  # all logits may exist at once
    got = value_and_grad(loss_of(sampling, LIMIT), has_aux=True)(given)
    assert by_parts == [pytest.approx(1 / (temperature or 1.0))]
    for (path, a), b in zip(tree.leaves_with_path(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


def test_a_truncated_distribution_needs_whole_rows(by_parts: list[float]) -> None:
    given, kept = inputs(tied=True), torch.full((ROWS,), 3)
    sampling = Sampling(top_k=3)
    want = value_and_grad(loss_of(sampling, 10**9, kept), has_aux=True)(given)
    got = value_and_grad(loss_of(sampling, LIMIT, kept), has_aux=True)(given)
    assert by_parts == []
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_adapted_head_and_a_policy_of_its_own_are_taken_through_their_logits(by_parts: list[float]) -> None:
    params, hidden = inputs(tied=False)
    adapted = Adapted(weight=params.head, a=torch.ones(2, 16), b=torch.ones(CONFIG.vocab_size, 2))
    value_and_grad(loss_of(Sampling(), LIMIT), has_aux=True)((replace(params, head=adapted), hidden))
    policy = Bigram(vocab_size=8)
    states = torch.ones(20, 8)
    decision_log_probs(policy, Sampling(), policy.init(), states, torch.zeros(20, dtype=torch.int64), max_logits=16)
    assert by_parts == []
