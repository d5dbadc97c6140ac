"""Laws of rollouts: a sequence does not depend on its batch, and training recomputes what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import Attention, Bigram

from areno_fn import tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.models import FAMILIES
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act
from areno_fn.testing import laws, strategies

BIGRAM, ATTENTION = Bigram(), Attention()

samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
)
stops = st.sets(st.integers(0, 10), max_size=4)


@st.composite
def batches(draw: Any, vocab_size: int) -> Prompts:
    rows = draw(st.lists(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=6), min_size=1, max_size=6))
    ids = draw(st.lists(st.integers(-(2**40), 2**40), min_size=len(rows), max_size=len(rows), unique=True))
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    filler = draw(st.integers(0, vocab_size - 1))
    return Prompts(
        tokens=torch.tensor([row + [filler] * (width - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        ids=torch.tensor(ids),
    )


def chosen(prompts: Prompts, rows: list[int]) -> Prompts:
    return tree.map(lambda x: x[torch.tensor(rows)], prompts)


def rows_of(rollout: Rollout) -> dict[int, Any]:
    """What was drawn, by the name of the sequence."""
    fields = (rollout.tokens, rollout.logp, rollout.lengths, rollout.finished)
    return {int(name): tuple(x[i].tolist() for x in fields) for i, name in enumerate(rollout.ids)}


@given(batches(11), strategies.keys(), samplings, stops, st.integers(1, 3), st.data())
def test_a_sequence_is_the_same_bit_for_bit_in_every_batch(
    prompts: Prompts, key: Key, sampling: Sampling, stop: set[int], samples: int, data: st.DataObject
) -> None:
    rollout, params = sampler(BIGRAM, stop), BIGRAM.init()
    whole = rows_of(rollout(params, prompts, key, sampling, samples=samples))
    order = data.draw(st.permutations(range(prompts.ids.shape[0])))
    cut = data.draw(st.integers(1, len(order)))
    apart: dict[int, Any] = {}
    for part in (order[:cut], order[cut:]):
        if part:
            apart |= rows_of(rollout(params, chosen(prompts, part), key, sampling, samples=samples))
    assert apart == whole
    limit = data.draw(st.integers(1, 20))
    assert rows_of(rollout(params, prompts, key, sampling, samples=samples, max_rows=limit)) == whole


@given(batches(23), strategies.keys(), samplings, st.integers(1, 3), st.integers(1, 7))
def test_a_sequence_is_the_same_with_other_rows_in_its_matrix_products(
    prompts: Prompts, key: Key, sampling: Sampling, samples: int, limit: int
) -> None:
    rollout, params = sampler(ATTENTION, (0, 1, 2, 3)), ATTENTION.init()
    whole = rollout(params, prompts, key, sampling, samples=samples)
    parts = rollout(params, prompts, key, sampling, samples=samples, max_rows=limit)
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.lengths, parts.lengths) and torch.equal(whole.finished, parts.finished)
    torch.testing.assert_close(whole.logp, parts.logp, rtol=0, atol=1e-5)


@given(batches(23), strategies.keys(), samplings, st.integers(1, 60), st.randoms(use_true_random=False))
def test_training_recomputes_what_the_rollout_recorded(
    prompts: Prompts, key: Key, sampling: Sampling, budget: int, shuffle: Any
) -> None:
    params = ATTENTION.init()
    drawn = sampler(ATTENTION, (0, 1, 2))(params, prompts, key, sampling, samples=3)
    rows = list(range(drawn.ids.shape[0]))
    shuffle.shuffle(rows)
    stage, decisions = act(ATTENTION, sampling), 0
    for batch in experience(drawn, torch.zeros(len(rows)), rows=torch.tensor(rows), micro_tokens=budget):
        actions = stage(params, batch)
        torch.testing.assert_close(actions.logp, actions.old, rtol=0, atol=1e-5)
        decisions += actions.logp.shape[0]
    assert decisions == int(drawn.lengths.sum())


def tiny(family: str, **fields: Any) -> tuple[Any, Any]:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    made = FAMILIES[family]
    config = made.config_from_hf({"model_type": family, **sizes, **heads, "initializer_range": 0.3, **fields})
    return made.policy(config), made.init(config, Key.of(3))


POLICIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bigram": lambda: (BIGRAM, BIGRAM.init()),
    "attention": lambda: (ATTENTION, ATTENTION.init()),
    "llama": lambda: tiny("llama", tie_word_embeddings=False, rope_theta=10000.0),
    "qwen3": lambda: tiny("qwen3", tie_word_embeddings=True, attention_bias=True, rope_theta=10000.0),
}
SAMPLINGS = {
    "plain": Sampling(max_tokens=8),
    "truncated": Sampling(max_tokens=8, temperature=0.7, top_k=30, top_p=0.95, min_p=0.01),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_training_recomputes_the_rollout_of_every_model(name: str, kind: str) -> None:
    policy, params = POLICIES[name]()
    source = torch.Generator().manual_seed(0)
    prompts = Prompts(
        tokens=torch.randint(0, policy.vocab_size, (5, 7), generator=source),
        lengths=torch.tensor([7, 1, 3, 5, 2]),
        ids=torch.tensor([5, 2, 90, 11, 4]),
    )
    sampling = SAMPLINGS[kind]
    drawn = laws.rollout_matches_training(policy, params, prompts, Key.of(1), sampling, stop=(0, 3, 7), samples=4)
    assert drawn.lengths.unique().shape[0] > 2
    again = sampler(policy, (0, 3, 7))(params, prompts, Key.of(1), sampling, samples=4, max_rows=3)
    assert torch.equal(again.tokens, drawn.tokens)
    for budget in (1, 30, 80):
        for batch in experience(drawn, torch.zeros(20), micro_tokens=budget):
            torch.testing.assert_close(act(policy, sampling)(params, batch).logp, batch.old, rtol=0, atol=1e-5)
