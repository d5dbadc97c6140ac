"""Rollouts on pages on a CUDA device: kernels against float64, captured steps, memory, and no waiting in between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from serving import STOP, Shape, drawn_requests, expected, same, served, tiny

from areno_fn import tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels import norm_rotary
from areno_fn.kernels.law import Case
from areno_fn.kernels.norm_rotary_pages import norm_rotary_pages
from areno_fn.kernels.paged_attention import cases as attention_cases
from areno_fn.kernels.paged_attention import paged_attention, write_pages
from areno_fn.kernels.sample import cases as sample_cases
from areno_fn.kernels.sample import sample
from areno_fn.models import FAMILIES
from areno_fn.steps.token.batching import Batch
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act
from areno_fn.steps.token.sequences import Prompt, Sample

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
PLAIN = Sampling(max_tokens=16)
CUT = Sampling(max_tokens=16, temperature=0.7, top_k=30, top_p=0.95, min_p=0.01)


def on_gpu(value: Any) -> Any:
    return tree.map(lambda x: x.to(DEVICE), value)


# ---------------------------------------------------------------------------------------- kernels


def attends(case: Case) -> None:
    positional, keywords = attention_cases.build(case, DEVICE)
    got = paged_attention(*positional, **keywords)
    want = attention_cases.oracle(*positional, **keywords).to(DEVICE)
    if want.numel():
        error = (got.double() - want).square().mean().sqrt()
        assert error <= attention_cases.tolerance(case.dtype, got.dtype) * want.square().mean().sqrt()
    assert torch.equal(got, paged_attention(*positional, **keywords))


@pytest.mark.usefixtures("poisoned_memory")
def test_attention_over_pages_is_the_formula() -> None:
    settings(max_examples=60, deadline=None, suppress_health_check=HEALTH)(given(attention_cases.STRATEGY)(attends))()
    for case in attention_cases.WIDE:
        attends(case)


@pytest.mark.parametrize("sizes", [(64, 16, 8, 128, 32, 12, 384), (2, 16, 8, 128, 32, 200, 6400)])
def test_attention_over_pages_is_that_of_a_plain_cache(sizes: tuple[int, ...]) -> None:
    (q, keys, values, table, lengths, scale), _ = attention_cases.build(Case(sizes=sizes, dtype=torch.bfloat16), DEVICE)
    got = paged_attention(q, keys, values, table, lengths, scale)
    rows = [x[table].flatten(1, 2).transpose(1, 2).double() for x in (keys, values)]
    seen = torch.arange(rows[0].shape[2], device=DEVICE) < lengths[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double()[:, :, None], *rows, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )[:, :, 0]
    assert (got.double() - want).norm() <= 4 * torch.finfo(torch.bfloat16).eps * want.norm()


def test_keys_and_values_are_written_to_their_places() -> None:
    qkv = torch.randn(
        300, 32, 128, device=DEVICE, dtype=torch.bfloat16, generator=torch.Generator(DEVICE).manual_seed(0)
    )
    k, v = qkv[:, 16:24], qkv[:, 24:]
    keys, values = (torch.full((40, 32, 8, 128), 9.0, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    places = 1 + torch.randperm(1279, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))[:300]
    write_pages(k, v, keys, values, places)
    for source, written in ((k, keys), (v, values)):
        flat = written.flatten(0, 1)
        assert torch.equal(flat[places], source)
        assert int((flat == 9.0).flatten(1).all(1).sum()) == 1280 - 300


def test_a_decoding_step_rotates_and_writes_as_the_two_steps_do() -> None:
    source = torch.Generator(DEVICE).manual_seed(2)
    for heads, shared, size in ((16, 8, 128), (9, 3, 64)):
        qkv = torch.randn(70, heads + 2 * shared, size, device=DEVICE, generator=source).bfloat16()
        weights = [torch.randn(size, device=DEVICE, generator=source).bfloat16() for _ in range(2)]
        angle = torch.randn(70, size // 2, device=DEVICE, generator=source)
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        places = 1 + torch.randperm(159, device=DEVICE, generator=source)[:70]
        one, other = (
            [torch.zeros(5, shared, 32, size, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
            for _ in range(2)
        )
        got = norm_rotary_pages(qkv, *weights, cos, sin, heads, 1e-6, *one, places)
        q, k = norm_rotary.forward(qkv, *weights, cos, sin, heads, 1e-6)
        write_pages(k, qkv[:, -shared:], *other, places)
        for x, want in zip((got, *one), (q, *other), strict=True):
            assert (x.double() - want.double()).norm() <= 2**-8 * want.double().norm()
        assert torch.equal(one[1], other[1])


def draws(case: Case) -> None:
    positional, rules = sample_cases.build(case, DEVICE)
    tokens, logp, kept = sample(*positional, **rules)
    for row, (order, x, score, counts) in enumerate(sample_cases.oracle(*positional, rules)):
        count, token = int(kept[row]), int(tokens[row])
        assert count in counts
        stay = order[:count]
        assert token in stay.tolist()
        assert float(score[stay].max() - score[token]) <= 1e-5 * max(1.0, float(score[token].abs()))
        assert float(logp[row]) == pytest.approx(
            float(x[token] - x[stay].logsumexp(0)), abs=4e-6 * max(1.0, float(x[token].abs()))
        )
    again = sample(*positional, **rules)
    assert torch.equal(tokens, again[0]) and torch.equal(logp, again[1]) and torch.equal(kept, again[2])


@pytest.mark.usefixtures("poisoned_memory")
def test_a_draw_is_the_definitions() -> None:
    settings(max_examples=80, deadline=None, suppress_health_check=HEALTH)(given(sample_cases.STRATEGY)(draws))()
    for case in sample_cases.WIDE:
        draws(case)


@pytest.mark.parametrize("rules", sample_cases.RULES)
def test_the_gpu_draws_what_the_cpu_draws(rules: str) -> None:
    positional, fields = sample_cases.build(
        Case(sizes=(64, 5000), dtype=torch.float32, variant=rules, magnitude=2.0), "cpu"
    )
    want = sample(*positional, **fields)
    got = sample(*on_gpu(list(positional)), **fields)
    alike = (got[0].cpu() == want[0]) & (got[2].cpu() == want[2])
    assert int(alike.sum()) >= 63, "one row may lie on a bound"
    torch.testing.assert_close(got[1].cpu()[alike], want[1][alike], rtol=0, atol=5e-6)


# ---------------------------------------------------------------------------------------- rollouts


def prompts(count: int = 12) -> Prompts:
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (count, 20), generator=source)
    return Prompts(
        tokens=tokens, lengths=1 + torch.randint(0, 20, (count,), generator=source), ids=torch.arange(count) * 7
    )


def close(got: Rollout, want: Rollout) -> None:
    """Tokens equal; log-probabilities up to the roundings of products that are added up in another order."""
    assert torch.equal(got.tokens.cpu(), want.tokens.cpu())
    assert torch.equal(got.lengths.cpu(), want.lengths.cpu()) and torch.equal(got.finished.cpu(), want.finished.cpu())
    assert torch.equal(got.ids.cpu(), want.ids.cpu())
    torch.testing.assert_close(got.logp.cpu(), want.logp.cpu(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_gpu_draws_the_rollout_of_the_cpu(sampling: Sampling, capture: bool, family: str) -> None:
    policy, params = tiny(family)
    want = sampler(policy, STOP)(params, prompts(), Key.of(1), sampling, samples=3)
    for read_tokens in (1 << 15, 5):
        paged = PagedSampler(policy, STOP, page_size=8, capture=capture, read_tokens=read_tokens)
        for max_rows in (None, 5, None):
            close(paged(on_gpu(params), on_gpu(prompts()), Key.of(1), sampling, samples=3, max_rows=max_rows), want)


def test_sampler_takes_pages_on_a_gpu_and_training_recomputes_its_numbers() -> None:
    policy, params = tiny("qwen3")
    params = on_gpu(params)
    drawn = sampler(policy, STOP)(params, on_gpu(prompts()), Key.of(1), PLAIN, samples=3)
    for batch in experience(drawn, torch.zeros(36, device=DEVICE), micro_tokens=200):
        torch.testing.assert_close(act(policy, PLAIN)(params, batch).logp, batch.old, rtol=0, atol=2e-4)


def test_R3_captured_steps_see_new_weights() -> None:
    policy, params = tiny("qwen3")
    paged = PagedSampler(policy, STOP, page_size=8)
    for factor in (1.0, 1.3, 0.8):
        moved = tree.map(lambda x, by=factor: x * by, params)
        want = sampler(policy, STOP)(moved, prompts(), Key.of(2), PLAIN, samples=2)
        close(paged(on_gpu(moved), on_gpu(prompts()), Key.of(2), PLAIN, samples=2), want)
    in_place = on_gpu(params)
    for factor in (1.0, 1.1):
        tree.map(lambda x, by=factor: x.mul_(by), in_place)
        want = sampler(policy, STOP)(tree.map(lambda x: x.cpu(), in_place), prompts(), Key.of(2), PLAIN, samples=2)
        close(paged(in_place, on_gpu(prompts()), Key.of(2), PLAIN, samples=2), want)


def test_requests_with_cancellations_get_what_they_get_alone() -> None:
    policy, params = tiny("qwen3")
    gpu, source = on_gpu(params), random.Random(5)
    for shape in (Shape(rows=8, page_size=4, spare=3, read_tokens=7), Shape(rows=20, page_size=16, spare=60)):
        requests = drawn_requests(source, 120, 1000)
        done = served(policy, gpu, Key.of(3), CUT, shape, requests)
        for request in requests:
            for name in request.names:
                if name in done:
                    (want,) = expected(policy, params, Key.of(3), CUT, [(request.prompt, name, request.limit)])
                    assert same(done[name], want, 2e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_token_step_never_waits_for_the_device() -> None:
    policy, params = tiny("qwen3")
    params = on_gpu(params)
    batch = Batch(policy, (), PLAIN, params, rows=8, pages=100, page_size=4, longest=40, device=DEVICE)
    with torch.no_grad():
        batch.load(params, Key.of(0))
        for i in range(12):
            batch.add(Sample(name=i, prompt=Prompt(tokens=[1, 2, 3 + i]), limit=9 + i % 5))
        for _ in range(3):
            batch.advance()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            ended = sum(len(finished.sequences) for _ in range(9) for finished in batch.advance())
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    assert ended >= 4, "some have ended and others were admitted in between"


def middling(family: str = "qwen3") -> tuple[Any, Any]:
    """A model in bfloat16 whose heads the fused kernels take."""
    made = FAMILIES[family]
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = made.config_from_hf({"model_type": family, **sizes, **heads, "tie_word_embeddings": True})
    return made.policy(config), made.init(config, Key.of(0), dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_in_half_precision_training_recomputes_what_was_recorded_up_to_roundings(family: str) -> None:
    policy, params = middling(family)
    sampling = Sampling(max_tokens=100)
    drawn = sampler(policy, (7,))(params, on_gpu(prompts()), Key.of(1), sampling, samples=4)
    apart = []
    with torch.no_grad():
        for batch in experience(drawn, torch.zeros(48, device=DEVICE), micro_tokens=4000):
            apart.append((act(policy, sampling)(params, batch).logp - batch.old).abs())
    off = torch.cat(apart)
    assert float(off.mean()) < 0.01 and float(off.max()) < 0.1


def test_a_rollout_after_the_first_takes_no_more_memory() -> None:
    policy, params = middling()
    paged = PagedSampler(policy, ())
    given = on_gpu(prompts())
    paged(params, given, Key.of(0), Sampling(max_tokens=64), samples=4)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for i in range(3):
        paged(params, given, Key.of(i), Sampling(max_tokens=64), samples=4)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
    paged.release()
    base = torch.cuda.memory_allocated()  # with what the libraries keep for themselves
    assert base < held - (1 << 20), "the cache and the captured steps are given back"
    paged(params, given, Key.of(0), Sampling(max_tokens=64), samples=4)
    paged.release()
    assert torch.cuda.memory_allocated() <= base + (1 << 20)
