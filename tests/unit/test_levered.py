"""Scoring and a separable loss as one, as a GPU runs them, against one after the other."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.batch import Example, Experience, PackedTokens
from areno_fn.contracts.errors import KernelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels import consistency
from areno_fn.kernels.consistency import BITWISE
from areno_fn.kernels.linear_token_loss import linear_token_loss
from areno_fn.models.decoder import DecoderConfig, init
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.compose import pipeline
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.separable import is_separable
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.token import head, levered
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.score import act, score

CONFIG = DecoderConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    initializer_range=0.5,
)  # fmt: skip
POLICY = DecoderPolicy(CONFIG)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the way of a GPU, some rows at a time, and counts how often the kernel is called."""
    found: list[int] = []
    kernel = levered.linear_token_loss

    def watched(*args: Any, **keywords: Any) -> Any:
        found.append(len(args[2]))
        return kernel(*args, **{**keywords, "chunk": 4 * CONFIG.vocab_size})

    monkeypatch.setattr(levered, "linear_token_loss", watched)
    monkeypatch.setattr(levered.levered, "__kwdefaults__", {"max_logits": 2 * CONFIG.vocab_size})
    monkeypatch.setattr(head, "in_parts", lambda hidden, matrix: hidden.dtype == matrix.dtype)
    return found


def packed() -> PackedTokens:
    examples = [
        Example(tokens=tuple(i * 7 % 50 for i in range(9)), trained=(False, *[True] * 8)),
        Example(tokens=tuple(i * 11 % 50 for i in range(6)), trained=(False, False, True, True, False, True)),
    ]
    batch = pack(examples)
    return replace(batch, weight=torch.linspace(0, 1.5, batch.weight.shape[0]))


def experience(kept: int = 0) -> Experience:
    batch = packed()
    count = batch.targets.shape[0]
    generator = torch.Generator().manual_seed(3)
    if kept:
        batch = replace(batch, kept=torch.full((count,), kept))
    return Experience(
        packed=batch,
        old=torch.randn(count, generator=generator) * 0.3 - 4,
        advantage=torch.randn(count, generator=generator),
        reference=torch.randn(count, generator=generator) * 0.3 - 4,
    )


def compared(first: Any, loss: Any, batch: Any, dtype: torch.dtype = torch.float32) -> None:
    params = tree.map(lambda x: x.to(dtype), init(CONFIG, Key.of(2)))
    together = pipeline(first, loss)
    derive = value_and_grad(lambda p, run: ((sums := run(p)).total, sums), has_aux=True)
    got = derive(params, lambda p: together(p, batch))
    want = derive(params, lambda p: loss(first(p, batch)))
    for (path, a), b in zip(tree.leaves_with_path(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_supervised(aggregation: str, calls: list[int]) -> None:
    compared(score(POLICY, Sampling(temperature=0.7)), cross_entropy(aggregation), packed())
    assert len(calls) == 1


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_the_clipped_surrogate(kl_coef: float, calls: list[int]) -> None:
    compared(act(POLICY, Sampling()), clipped(dual=3.0, kl_coef=kl_coef), experience())
    assert len(calls) == 1


def test_a_truncated_distribution(calls: list[int]) -> None:
    compared(act(POLICY, Sampling(top_k=7, top_p=0.9)), clipped(), experience(kept=5))
    assert len(calls) == 1


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=7, top_p=0.9)])
def test_log_probabilities_of_a_rollout_bit_for_bit(
    sampling: Sampling, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []

    def ordered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        products.append(len(x))
        return BITWISE.linear(x, weight, bias)

    monkeypatch.setitem(consistency._BY_NAME, "bitwise", attrs.evolve(BITWISE, linear=ordered))
    policy = attrs.evolve(POLICY, consistency="bitwise")
    kept = 5 if sampling.top_k else 0
    compared(act(policy, sampling), clipped(kl_coef=0.1), experience(kept=kept), torch.float64)
    assert len(calls) == 1
    assert 4 in products  # the logits of four rows are made by the product of the rollout


def test_a_product_of_its_own_is_scored_by_the_caller() -> None:
    x, targets = torch.ones(3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(KernelError, match="give `scored` with `linear`"):
        linear_token_loss(x, torch.ones(4, 2), targets, lambda first, logp, _: logp, linear=lambda x, w: x @ w.t())


def test_a_loss_of_sequences_waits_for_all_log_probabilities(calls: list[int]) -> None:
    loss = sequence_clipped()
    assert not is_separable(loss)
    compared(act(POLICY, Sampling()), loss, experience())
    assert calls == []


def test_without_a_gradient_none_is_made(calls: list[int]) -> None:
    params, loss = init(CONFIG, Key.of(2)), cross_entropy()
    together = pipeline(score(POLICY, Sampling()), loss)
    with torch.no_grad():
        got = together(params, packed()).total
    assert calls == []
    torch.testing.assert_close(got, loss(score(POLICY, Sampling())(params, packed())).total)
