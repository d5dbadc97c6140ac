"""Windows and soft caps, symmetric products and losses of a linear head on a CUDA device, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounded_attention import errors, nearest

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.batch import Example
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels.attention.cases import CASES as ATTENTION
from areno_fn.kernels.law import Case, against_oracle, cotangents_of, pulled
from areno_fn.kernels.paged_attention import cases as paged_cases
from areno_fn.kernels.paged_attention import paged_attention
from areno_fn.kernels.symmetric_product import cases as symmetric_cases
from areno_fn.kernels.symmetric_product import symmetric_product
from areno_fn.models.decoder import DecoderConfig, init
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.compose import pipeline
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.score import score

pytestmark = pytest.mark.gpu

SEEN = [*ATTENTION.wide, *ATTENTION.hot]


@pytest.mark.parametrize("case", SEEN, ids=lambda case: f"{'x'.join(map(str, case.sizes))}-{case.variant}")
def test_attention_is_the_formula_and_gives_the_same_bits(case: Case, poisoned_memory: None) -> None:
    assert [d for d in against_oracle(ATTENTION, case, "cuda") if not d.fits] == []
    arguments = ATTENTION.build(case, "cuda")
    cotangents = cotangents_of(ATTENTION, case, arguments)
    first, second = (pulled(ATTENTION.function, arguments, (0,), cotangents) for _ in range(2))
    if "cap" in case.variant:  # torch's kernels may add by atomics
        assert tree.first_difference(first, second) is None
    torch.cuda.empty_cache()


@pytest.mark.parametrize("cap", [30, 50])
def test_peaked_weights_are_as_exact_as_a_rounded_result_lets_them_be(cap: int) -> None:
    drawn = [
        Case(sizes=(1, 2, 256, 300, 40), dtype=torch.bfloat16, variant=f"cap {cap}", magnitude=100.0, seed=seed)
        for seed in range(4)
    ]
    ours, plain, _ = torch.stack([errors(case, "cuda", nearest) for case in drawn]).mean(0).sqrt()
    assert (ours < 1.1 * plain).all(), (ours, plain)


@pytest.mark.parametrize("variant", ["cap 5", "100 cap 5"])
def test_pages_with_a_soft_cap(variant: str) -> None:
    case = Case(sizes=(5, 16, 8, 128, 32, 12, 371), dtype=torch.bfloat16, variant=variant)
    positional, keywords = paged_cases.build(case, "cuda")
    got, want = paged_attention(*positional, **keywords), paged_cases.oracle(*positional, **keywords)
    error = (got.double().cpu() - want.cpu()).norm() / want.norm()
    assert error < paged_cases.tolerance(case.dtype, got.dtype)


@pytest.mark.parametrize(
    "case", [*symmetric_cases.WIDE, *symmetric_cases.HOT], ids=lambda case: "x".join(map(str, case.sizes))
)
def test_symmetric_products_are_the_formula(case: Case, poisoned_memory: None) -> None:
    given, keywords = symmetric_cases.build(case, "cuda")
    got, want = symmetric_product(*given, **keywords), symmetric_cases.oracle(*given, **keywords)
    size = want.square().mean().sqrt().item() + symmetric_cases.noise(*given, **keywords)
    error = (got.double() - want).square().mean().sqrt().item()
    assert error <= symmetric_cases.tolerance(case.dtype, got.dtype) * size
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=40, top_p=0.9)])
def test_scoring_and_a_loss_as_one_are_both_after_another(sampling: Sampling, monkeypatch: Any) -> None:
    from areno_fn.steps.token import levered

    config = DecoderConfig(
        vocab_size=3001, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
        initializer_range=0.08,
    )  # fmt: skip
    params = tree.map(lambda x: x.to("cuda", torch.bfloat16), init(config, Key.of(3)))
    examples = [
        Example(tokens=tuple(i * k % 3001 for i in range(400)), trained=(False, *[True] * 399)) for k in (7, 11)
    ]
    batch = tree.map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, pack(examples))
    batch = replace(batch, kept=torch.full_like(batch.targets, 40))
    monkeypatch.setattr(levered.levered, "__kwdefaults__", {"max_logits": 200 * 3001})
    first, loss = score(DecoderPolicy(config), sampling), cross_entropy()
    together = pipeline(first, loss)
    got, got_gradient = value_and_grad(lambda p: together(p, batch).total)(params)
    want, want_gradient = value_and_grad(lambda p: loss(first(p, batch)).total)(params)
    assert abs(got - want) < 1e-2 * abs(want)
    for (path, a), b in zip(tree.leaves_with_path(got_gradient), tree.leaves(want_gradient), strict=True):
        assert (a.double() - b.double()).norm() < 3e-2 * b.double().norm(), path
