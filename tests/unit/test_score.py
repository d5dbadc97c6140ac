"""Scoring stages: values against float64, gradients, memory of the logits, caches and padding."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch
from toy_policy import Attention, Bigram, Watched

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Actions, Scores
from areno_fn.contracts.batch import Example, Experience, PackedTokens, Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.head import decision_log_probs
from areno_fn.steps.token.pack import micro_batches, pack
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, reference_logp, score

POLICY = Attention()
PARAMS = POLICY.init()
TRUNCATED = Sampling(max_tokens=6, temperature=0.8, top_k=15, top_p=0.97, min_p=0.01)


def example(tokens: list[int], prompt: int) -> Example:
    return Example(tokens=tuple(tokens), trained=tuple(i >= prompt for i in range(len(tokens))))


def some_rows(count: int = 8) -> list[Example]:
    source = torch.Generator().manual_seed(4)
    sizes = torch.randint(3, 12, (count,), generator=source).tolist()
    return [example(torch.randint(0, POLICY.vocab_size, (n,), generator=source).tolist(), prompt=2) for n in sizes]


def double(params: Any) -> Any:
    return tree.map(lambda x: x.double(), params)


def test_scores_are_the_log_probabilities_of_the_targets() -> None:
    rows = some_rows()
    packed = pack(rows)
    scores = score(POLICY, Sampling())(PARAMS, packed)
    exact, segments = [], []
    for number, row in enumerate(rows):  # every document alone, every place scored, in float64
        n = len(row.tokens)
        tokens, places = torch.tensor(row.tokens), torch.arange(n)
        hidden = POLICY.hidden(double(PARAMS), tokens, places, torch.zeros_like(places))
        logp = POLICY.logits(double(PARAMS), hidden).log_softmax(-1)
        exact += [logp[i - 1, row.tokens[i]] for i in range(2, n)]
        segments += [number] * (n - 2)
    torch.testing.assert_close(scores.logp.double(), torch.stack(exact), rtol=0, atol=2e-6)
    assert scores.segments.tolist() == segments
    assert scores.documents == len(rows)
    assert scores.logp.dtype == scores.entropy.dtype == torch.float32


def test_stages_say_what_they_join() -> None:
    hints = typing.get_type_hints(score(POLICY, Sampling()))
    assert (hints["batch"], hints["return"]) == (PackedTokens, Scores)
    hints = typing.get_type_hints(act(POLICY, Sampling()))
    assert (hints["batch"], hints["return"]) == (Experience, Actions)


def test_act_carries_what_was_recorded() -> None:
    packed = pack(some_rows())
    count = packed.targets.shape[0]
    old, advantage, reference = torch.arange(3.0 * count).view(3, count)
    batch = Experience(packed=packed, old=old, advantage=advantage, reference=reference)
    actions, scores = act(POLICY, TRUNCATED)(PARAMS, batch), score(POLICY, TRUNCATED)(PARAMS, packed)
    assert tree.equal((actions.old, actions.advantage, actions.reference), (old, advantage, reference))
    for name in ("logp", "weight", "segments", "entropy"):
        assert torch.equal(getattr(actions, name), getattr(scores, name))


def test_the_recorded_number_of_tokens_overrules_the_rules() -> None:
    packed = pack(some_rows())
    two = torch.full_like(packed.targets, 2)
    bound = score(POLICY, Sampling(top_p=0.9))(PARAMS, replace(packed, kept=two))
    exact = score(POLICY, Sampling(top_k=2))(PARAMS, packed)
    assert torch.equal(bound.logp, exact.logp) and torch.equal(bound.entropy, exact.entropy)
    assert not torch.equal(bound.logp, score(POLICY, Sampling(top_p=0.9))(PARAMS, packed).logp)


def test_entropy_carries_no_gradient_and_the_reference_none_at_all() -> None:
    packed = pack(some_rows())
    params = tree.map(lambda x: x.clone().requires_grad_(), PARAMS)
    scores = score(POLICY, TRUNCATED)(params, packed)
    assert scores.logp.requires_grad and not scores.entropy.requires_grad
    reference = reference_logp(POLICY, TRUNCATED)(params, packed)
    assert not reference.requires_grad
    assert torch.equal(reference, scores.logp)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("sampling", [Sampling(), TRUNCATED])
def test_logits_made_in_chunks_give_the_values_and_gradients_of_the_whole(rows: int, sampling: Sampling) -> None:
    source = torch.Generator().manual_seed(1)
    hidden = torch.randn(20, POLICY.width, generator=source)
    targets = torch.randint(0, POLICY.vocab_size, (20,), generator=source)
    weight = torch.randn(20, generator=source)
    policy = Watched(POLICY)
    kept = None if sampling.top_k == 0 else torch.arange(1, 21).clamp_max(sampling.top_k)

    def loss(inputs: Any, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        params, states = inputs
        logp, entropy = decision_log_probs(policy, sampling, params, states, targets, kept, max_logits=limit)
        return (logp * weight).sum() + params.place.sum(), entropy

    (value, entropy), gradient = value_and_grad(loss, has_aux=True)((PARAMS, hidden), 10**9)
    policy.logits_made.clear()
    limit = rows * POLICY.vocab_size
    (chunked, chunked_entropy), chunked_gradient = value_and_grad(loss, has_aux=True)((PARAMS, hidden), limit)
    torch.testing.assert_close(chunked, value)
    torch.testing.assert_close(chunked_entropy, entropy)
    for a, b in zip(tree.leaves(chunked_gradient), tree.leaves(gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert max(policy.logits_made) <= limit
    if rows < 20:  # made once in the forward pass and once in the backward pass
        assert sum(policy.logits_made) == 2 * 20 * POLICY.vocab_size
    assert float(chunked_gradient[0].embed.abs().max()) == 0
    assert chunked_gradient[0].place.unique().tolist() == [1.0]


def test_chunks_also_work_under_plain_autograd_and_without_a_gradient() -> None:
    source = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, POLICY.width, generator=source)
    targets = torch.arange(9)
    params = tree.map(lambda x: x.clone().requires_grad_(), PARAMS)
    limit = 2 * POLICY.vocab_size
    whole, _ = decision_log_probs(POLICY, Sampling(), params, hidden, targets)
    parts, _ = decision_log_probs(POLICY, Sampling(), params, hidden, targets, max_logits=limit)
    (a,), (b,) = torch.autograd.grad(whole.sum(), [params.head]), torch.autograd.grad(parts.sum(), [params.head])
    torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert torch.equal(decision_log_probs(POLICY, Sampling(), params, hidden, targets, max_logits=limit)[0], parts)


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself
def test_chunks_compile_without_a_graph_break() -> None:
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, POLICY.width, generator=source)
    targets, kept = torch.arange(9), torch.arange(9) + 1

    def loss(params: Any) -> torch.Tensor:
        limit = 4 * POLICY.vocab_size
        return decision_log_probs(POLICY, TRUNCATED, params, hidden, targets, kept, max_logits=limit)[0].sum()

    value, gradient = value_and_grad(loss)(PARAMS)
    compiled_value, compiled = torch.compile(value_and_grad(loss), fullgraph=True, backend="aot_eager")(PARAMS)
    torch.testing.assert_close(compiled_value, value)
    for a, b in zip(tree.leaves(compiled), tree.leaves(gradient), strict=True):
        torch.testing.assert_close(a, b)


def test_chunks_of_bfloat16_parameters_sum_their_gradients_in_float32() -> None:
    """A thousand equal contributions, one a chunk: a bfloat16 sum would stop growing at 256 of them."""
    policy = Bigram(vocab_size=2)
    params = policy.init(dtype=torch.bfloat16)
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16).expand(1000, 2)
    targets = torch.zeros(1000, dtype=torch.int64)

    def loss(params: Any, limit: int) -> torch.Tensor:
        return decision_log_probs(policy, Sampling(), params, hidden, targets, max_logits=limit)[0].sum()

    _, whole = value_and_grad(loss)(params, 10**9)
    _, parts = value_and_grad(loss)(params, 2)
    assert float(whole.head) == pytest.approx(1000 * (1 - 1 / (1 + torch.e**-1)), rel=0.01)
    assert float(parts.head) == pytest.approx(float(whole.head), rel=0.01)


def test_R2_rows_score_alike_in_every_batch() -> None:
    rows = some_rows(8)
    stage = score(POLICY, TRUNCATED)
    sizes = [len(row.tokens) - 2 for row in rows]
    whole = torch.split(stage(PARAMS, pack(rows)).logp, sizes)
    for row, together in zip(rows, whole, strict=True):
        torch.testing.assert_close(stage(PARAMS, pack([row])).logp, together, rtol=0, atol=1e-6)
    for budget in (5, 16, 30, 1000):
        total = sum(float(stage(PARAMS, batch).logp.double().sum()) for batch in micro_batches(rows, budget))
        assert total == pytest.approx(float(sum(x.double().sum() for x in whole)), abs=1e-5)


def prompts() -> Prompts:
    return Prompts(
        tokens=torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]]),
        lengths=torch.tensor([4, 2, 1]),
        ids=torch.tensor([3, 1, 2]),
    )


def ratios(params: Any, batches: tuple[Experience, ...], sampling: Sampling) -> torch.Tensor:
    stage = act(POLICY, sampling)
    return torch.cat([(a.logp - a.old).exp() for a in (stage(params, batch) for batch in batches)])


def test_R2_the_ratio_before_an_update_is_one_for_every_split() -> None:
    drawn = sampler(POLICY, (0,))(PARAMS, prompts(), Key.of(2), TRUNCATED, samples=6)
    for budget in (1, 20, 50, 1000):
        ratio = ratios(PARAMS, experience(drawn, torch.ones(18), micro_tokens=budget), TRUNCATED)
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=2e-6)


def test_R3_after_an_update_the_rollout_uses_the_new_parameters() -> None:
    rollout = sampler(POLICY, (0,))
    rollout(PARAMS, prompts(), Key.of(2), TRUNCATED, samples=6)
    moved = tree.map(lambda x: x + 0.3 * x.cos(), PARAMS)
    drawn = rollout(moved, prompts(), Key.of(2), TRUNCATED, samples=6)
    batches = experience(drawn, torch.ones(18), micro_tokens=1000)
    ratio = ratios(moved, batches, TRUNCATED)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    assert float((ratios(PARAMS, batches, TRUNCATED) - 1).abs().max()) > 0.01


def test_R5_padding_does_not_reach_positions_or_attention() -> None:
    rollout, sampling = sampler(POLICY, ()), Sampling(max_tokens=5)
    narrow = Prompts(tokens=torch.tensor([[5, 6]]), lengths=torch.tensor([2]), ids=torch.tensor([1]))
    alone = rollout(PARAMS, narrow, Key.of(0), sampling)
    for rubbish in (0, 9):
        wide = torch.full((1, 9), rubbish)
        wide[0, :2] = torch.tensor([5, 6])
        padded = rollout(PARAMS, Prompts(tokens=wide, lengths=narrow.lengths, ids=narrow.ids), Key.of(0), sampling)
        assert torch.equal(padded.tokens, alone.tokens)
        assert torch.equal(padded.logp, alone.logp)
    beside = rollout(PARAMS, prompts(), Key.of(0), sampling)  # the same prompt and id, next to a longer one
    assert torch.equal(beside.tokens[1], alone.tokens[0])
    torch.testing.assert_close(beside.logp[1], alone.logp[0], rtol=0, atol=1e-6)
