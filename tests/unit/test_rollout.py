"""Rollouts: where they stop, what they record, what they read, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from toy_policy import Attention, Bigram, BigramParams, Watched

from areno_fn import tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.errors import DataError, ModelError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.sampling import draw
from areno_fn.steps.token.score import act, reference_logp, score
from areno_fn.testing.laws import rollout_matches_training


def prompts(*rows: list[int], ids: list[int] | None = None) -> Prompts:
    width = max(len(row) for row in rows)
    return Prompts(
        tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        ids=torch.tensor(ids or list(range(len(rows)))),
    )


def chain(successor: dict[int, int], size: int) -> BigramParams:
    """A policy that goes from each token to its successor, near certainty."""
    table = torch.zeros(size, size)
    for a, b in successor.items():
        table[a, b] = 50.0
    return BigramParams(table=table, head=torch.ones(()))


def test_D3_every_stop_token_ends_a_sequence() -> None:
    policy = Bigram(vocab_size=110)
    params = chain({7: 5, 5: 106, 106: 9, 8: 1, 1: 9, 9: 9}, 110)
    out = sampler(policy, {1, 106})(params, prompts([7], [8], [9]), Key.of(0), Sampling(max_tokens=4))
    assert out.tokens.tolist() == [[5, 106, 0, 0], [1, 0, 0, 0], [9, 9, 9, 9]]
    assert out.lengths.tolist() == [2, 1, 4]
    assert out.finished.tolist() == [True, True, False]
    (batch,) = experience(out, torch.zeros(3), micro_tokens=100)
    drawn = [batch.packed.targets[batch.packed.segments[batch.packed.index] == i].tolist() for i in range(3)]
    assert sorted(drawn) == [[1], [5, 106], [9, 9, 9, 9]]


def test_D2_a_stop_token_that_equals_the_padding_is_part_of_the_completion() -> None:
    policy = Bigram(vocab_size=3)
    out = sampler(policy, (0,))(chain({2: 1, 1: 0}, 3), prompts([2], [1]), Key.of(0), Sampling(max_tokens=3))
    assert out.tokens.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert out.lengths.tolist() == [2, 1]
    (batch,) = experience(out, torch.zeros(2), micro_tokens=100)
    assert batch.packed.targets.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=7), Sampling(max_tokens=7, temperature=0.7, top_k=8, top_p=0.95, min_p=0.02)]
)
def test_R1_the_recorded_number_is_that_of_the_token_drawn(sampling: Sampling) -> None:
    policy = Bigram()
    params = policy.init()
    out = sampler(policy, (0,))(params, prompts([1, 2], [3]), Key.of(4), sampling, samples=20)
    seen = 0
    for row in range(40):
        before = int(out.prompts.tokens[row, out.prompts.lengths[row] - 1])
        for t in range(int(out.lengths[row])):
            token = int(out.tokens[row, t])
            weights = _distribution(params.table[before].tolist(), sampling)
            assert float(out.logp[row, t]) == pytest.approx(weights[token], abs=2e-6)
            assert out.kept is None or int(out.kept[row, t]) == len(weights)
            before, seen = token, seen + 1
    assert seen == int(out.lengths.sum()) > 80
    past = torch.arange(7) >= out.lengths[:, None]
    assert (out.kept is None) == (sampling.top_k == 0)
    assert out.kept is None or bool((out.kept[past] == 1).all())
    assert bool((out.logp[past] == 0).all()) and bool((out.tokens[past] == 0).all())


def _distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Log-probabilities by definition, for logits that no rule cuts close."""
    weights = torch.tensor(logits, dtype=torch.float64).div(sampling.temperature).softmax(-1)
    order = weights.argsort(descending=True)[: sampling.top_k or None]
    share = weights[order] / weights[order].sum()
    stay = order[(share.cumsum(0) - share < sampling.top_p) & (share >= sampling.min_p * share[0])]
    logp = (weights[stay] / weights[stay].sum()).log()
    return dict(zip(stay.tolist(), logp.tolist(), strict=True))


def test_a_token_is_drawn_with_the_noise_of_its_name_and_place() -> None:
    policy, key, sampling = Bigram(), Key.of(6), Sampling(max_tokens=6, temperature=1.5)
    params = policy.init()
    out = sampler(policy, ())(params, prompts([1, 2, 3], [4], ids=[8, 30]), key, sampling, samples=2)
    before = torch.tensor([3, 3, 4, 4])
    for t in range(6):
        again = draw(
            params.table[before], sampling, key, torch.tensor([16, 17, 60, 61]), torch.tensor([3, 3, 1, 1]) + t
        )
        assert torch.equal(out.tokens[:, t], again.tokens)
        before = again.tokens


def test_samples_of_a_prompt_stand_together_and_are_named_after_it() -> None:
    policy = Bigram()
    out = sampler(policy, ())(
        policy.init(), prompts([1], [2, 3], ids=[40, 7]), Key.of(0), Sampling(max_tokens=2), samples=3
    )
    assert out.groups.tolist() == out.prompts.ids.tolist() == [40, 40, 40, 7, 7, 7]
    assert out.ids.tolist() == [120, 121, 122, 21, 22, 23]
    assert out.prompts.tokens.tolist() == [[1, 0]] * 3 + [[2, 3]] * 3
    assert out.prompts.lengths.tolist() == [1, 1, 1, 2, 2, 2]
    assert len({tuple(row) for row in out.tokens.tolist()}) > 1


def test_a_prompt_is_read_once_and_finished_rows_leave() -> None:
    policy = Watched(Bigram(vocab_size=9))
    params = chain({1: 2, 2: 3, 3: 4, 4: 5, 5: 0, 6: 5, 7: 5, 8: 5}, 9)
    out = sampler(policy, (0,))(params, prompts([1], [6], [7], [8]), Key.of(0), Sampling(max_tokens=8), samples=2)
    assert policy.prefilled == [(4, 1)]
    assert out.lengths.tolist() == [5, 5, 2, 2, 2, 2, 2, 2]
    assert policy.decoded == [8, 2, 2, 2]  # six of eight stop at their second token; all at the fifth


def test_rows_stay_while_more_than_half_go_on() -> None:
    policy = Watched(Bigram(vocab_size=9))
    params = chain({1: 2, 2: 2, 3: 0}, 9)
    rows = prompts([1], [1], [3], ids=[0, 1, 2])
    out = sampler(policy, (0,))(params, rows, Key.of(0), Sampling(max_tokens=4))
    assert policy.decoded == [3, 3, 3]
    assert out.tokens.tolist() == [[2, 2, 2, 2], [2, 2, 2, 2], [0, 0, 0, 0]]
    assert out.lengths.tolist() == [4, 4, 1]


def test_the_cache_has_room_for_what_is_read_and_no_more() -> None:
    policy = Watched(Attention())
    wide = Prompts(tokens=torch.ones(2, 9, dtype=torch.int64), lengths=torch.tensor([3, 5]), ids=torch.tensor([0, 1]))
    sampler(policy, ())(policy.inner.init(), wide, Key.of(0), Sampling(max_tokens=4))
    assert policy.prefilled == [(2, 5)]
    assert policy.capacities == [5 + 4 - 1]
    assert policy.decoded == [2, 2, 2]


def test_all_rows_stop_at_the_first_token() -> None:
    policy = Watched(Bigram(vocab_size=4))
    out = sampler(policy, (3,))(chain({1: 3, 2: 3}, 4), prompts([1], [2]), Key.of(0), Sampling(max_tokens=9))
    assert policy.decoded == []
    assert out.lengths.tolist() == [1, 1] and out.finished.tolist() == [True, True]
    assert out.tokens.shape == out.logp.shape == (2, 9)


def test_a_limit_of_one_token() -> None:
    policy = Watched(Attention())
    out = sampler(policy, (0,))(policy.inner.init(), prompts([1, 2], [3]), Key.of(0), Sampling(max_tokens=1), samples=2)
    assert policy.decoded == []
    assert out.tokens.shape == (4, 1) and out.lengths.tolist() == [1] * 4
    assert out.finished.tolist() == (out.tokens[:, 0] == 0).tolist()


def test_temperature_zero_is_the_same_for_every_key() -> None:
    policy = Attention()
    greedy = Sampling(max_tokens=6, temperature=0.0)
    a, b = (sampler(policy, ())(policy.init(), prompts([1, 2]), Key.of(seed), greedy) for seed in (0, 1))
    assert torch.equal(a.tokens, b.tokens)
    hot = sampler(policy, ())(policy.init(), prompts([1, 2]), Key.of(0), Sampling(max_tokens=6))
    assert not torch.equal(a.tokens, hot.tokens)


def test_nothing_of_a_rollout_is_bound_to_a_graph_or_to_inference() -> None:
    policy = Attention()
    params = tree.map(lambda x: x.clone().requires_grad_(), policy.init())
    out: Rollout = sampler(policy, (0,))(params, prompts([1]), Key.of(0), Sampling(max_tokens=3), samples=2)
    for leaf in tree.leaves(out):
        assert not leaf.requires_grad and not leaf.is_inference()
    assert torch.is_grad_enabled()


def test_bfloat16_logits_are_recorded_in_float32() -> None:
    policy = Bigram()
    params = policy.init(dtype=torch.bfloat16)
    sampling = Sampling(max_tokens=5, top_p=0.9)
    out = sampler(policy, (0,))(params, prompts([1], [2]), Key.of(0), sampling, samples=8)
    assert out.logp.dtype == torch.float32
    wide = tree.map(lambda x: x.float(), params)
    again = sampler(policy, (0,))(wide, prompts([1], [2]), Key.of(0), sampling, samples=8)
    assert tree.equal(out, again)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (prompts([1, 2, 3, 4], [5], ids=[9, 8]), "prompt 9 has 4 tokens and may be continued by 61.* 64 positions"),
        (
            Prompts(tokens=torch.ones(1, 2).long(), lengths=torch.tensor([0]), ids=torch.tensor([5])),
            "prompt 5 has length 0",
        ),
        (
            Prompts(tokens=torch.ones(1, 2).long(), lengths=torch.tensor([3]), ids=torch.tensor([5])),
            "prompt 5 has length 3",
        ),
        (prompts([1], [2], ids=[4, 4]), "two prompts have the id 4"),
        (
            Prompts(tokens=torch.ones(0, 2).long(), lengths=torch.ones(0).long(), ids=torch.ones(0).long()),
            "at least one prompt",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_before_anything_is_computed(given: Prompts, words: str) -> None:
    policy = Watched(Bigram())
    with pytest.raises(DataError, match=words):
        sampler(policy, ())(policy.inner.init(), given, Key.of(0), Sampling(max_tokens=61))
    assert policy.prefilled == []


def test_the_longest_sequence_that_fits_is_drawn() -> None:
    policy = Attention()
    out = sampler(policy, ())(policy.init(), prompts([1, 2, 3, 4]), Key.of(0), Sampling(max_tokens=44))
    assert out.lengths.tolist() == [44]


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match="stop token 11 is not among the model's 11 tokens"):
        sampler(Bigram(), (0, 11))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", 1e-38),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", 1.0),
        ("min_p", -0.1),
    ],
)
def test_a_distribution_that_is_none(field: str, value: Any) -> None:
    policy, sampling = Bigram(vocab_size=3), Sampling(**{field: value})
    with pytest.raises(SpecError, match=f"Sampling.{field} is {value}, but must be "):
        sampler(policy, (0,))(chain({2: 1}, 3), prompts([2]), Key.of(0), sampling)
    for stage in (score, act, reference_logp):
        with pytest.raises(SpecError, match=f"Sampling.{field} is {value}"):
            stage(policy, sampling)


@pytest.mark.parametrize(("name", "count"), [("samples", 0), ("samples", -1), ("max_rows", 0), ("max_rows", -1)])
def test_counts_below_one(name: str, count: int) -> None:
    rollout = sampler(Bigram(vocab_size=3), (0,))
    with pytest.raises(SpecError, match=f"a rollout needs {name} of at least 1, received {count}"):
        rollout(chain({2: 1}, 3), prompts([2]), Key.of(0), Sampling(max_tokens=2), **{name: count})


def test_ids_whose_sequences_would_wrap_around_to_one_name() -> None:
    """0 * 4 and 2^62 * 4 are one 64-bit word, so both prompts would be continued by one stream."""
    rollout, params = sampler(Bigram(vocab_size=3), (0,)), chain({2: 1}, 3)
    with pytest.raises(DataError, match="the prompt id 4611686018427387904 times 4 samples does not fit 64 bits"):
        rollout(params, prompts([2], [2], ids=[0, 2**62]), Key.of(0), Sampling(max_tokens=2), samples=4)
    rollout(params, prompts([2], [2], ids=[-(2**61), 2**61 - 1]), Key.of(0), Sampling(max_tokens=2), samples=4)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=5), Sampling(max_tokens=5, temperature=0.5, top_p=0.8)])
def test_parameters_in_float64(sampling: Sampling) -> None:
    params = BigramParams(
        table=torch.linspace(-2, 2, 81, dtype=torch.float64).reshape(9, 9).sin(),
        head=torch.ones((), dtype=torch.float64),
    )
    out = rollout_matches_training(Bigram(vocab_size=9), params, prompts([3], [4, 5]), Key.of(0), sampling, stop=(8,))
    assert out.logp.dtype == torch.float32
