"""From a rollout to micro-batches: replay, masks, mini-batches, reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from toy_policy import Attention

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.batch import Experience, Prompts, Rollout
from areno_fn.contracts.errors import DataError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.experience import completion_kl, experience, minibatches, over_completions
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, reference_logp

POLICY = Attention()
PARAMS = POLICY.init()
SAMPLING = Sampling(max_tokens=6, temperature=0.9, top_p=0.97)


def drawn() -> Rollout:
    prompts = Prompts(
        tokens=torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0]]),
        lengths=torch.tensor([3, 2, 1]),
        ids=torch.tensor([9, 4, 6]),
    )
    return sampler(POLICY, (0, 1, 2, 3))(PARAMS, prompts, Key.of(5), SAMPLING, samples=4)


def written(lengths: list[int], finished: list[bool]) -> Rollout:
    """A rollout by hand: every prompt is [7], row i draws 10 i, 10 i + 1, .. with log-probabilities -(10 i + t)."""
    rows, width = len(lengths), max(lengths)
    values = torch.arange(width) + 10 * torch.arange(rows)[:, None]
    values = values * (torch.arange(width) < torch.tensor(lengths)[:, None])
    ids = torch.arange(rows)
    return Rollout(
        prompts=Prompts(tokens=torch.full((rows, 1), 7), lengths=torch.ones(rows, dtype=torch.int64), ids=ids),
        groups=ids,
        ids=ids,
        tokens=values,
        lengths=torch.tensor(lengths),
        logp=-values.float(),
        finished=torch.tensor(finished),
    )


def test_every_drawn_token_is_a_decision_with_what_was_recorded_of_it() -> None:
    (batch,) = experience(written([1, 3], [True, True]), torch.tensor([0.5, -2.0]), micro_tokens=100)
    packed = batch.packed
    assert packed.tokens.tolist() == [7, 10, 11, 12, 7, 0]  # the longest first
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.segments.tolist() == [0, 0, 0, 0, 1, 1]
    assert packed.index.tolist() == [0, 1, 2, 4]
    assert packed.targets.tolist() == [10, 11, 12, 0]
    assert packed.weight.tolist() == [1.0] * 4
    assert (packed.documents, packed.longest) == (2, 4)
    assert batch.old.tolist() == [-10.0, -11.0, -12.0, 0.0]
    assert batch.advantage.tolist() == [-2.0, -2.0, -2.0, 0.5]
    assert batch.reference is None


def test_L5_a_truncated_row_is_in_neither_numerator_nor_denominator() -> None:
    rollout = written([8, 4], [False, True])
    masked = experience(rollout, torch.ones(2), micro_tokens=100, mask_truncated=True)
    assert sum(float(batch.packed.weight.sum()) for batch in masked) == 4
    kept = [
        t
        for batch in masked
        for t, w in zip(batch.packed.targets.tolist(), batch.packed.weight.tolist(), strict=True)
        if w
    ]
    assert kept == [10, 11, 12, 13]
    counted = experience(rollout, torch.ones(2), micro_tokens=100)
    assert sum(float(batch.packed.weight.sum()) for batch in counted) == 12
    nothing = experience(written([8, 4], [False, False]), torch.ones(2), micro_tokens=100, mask_truncated=True)
    assert sum(float(batch.packed.weight.sum()) for batch in nothing) == 0


@pytest.mark.parametrize("budget", [1, 9, 25, 1000])
def test_micro_batches_hold_every_row_once(budget: int) -> None:
    rollout = drawn()
    advantages = torch.arange(12.0)
    batches = experience(rollout, advantages, micro_tokens=budget)
    found = sorted(
        x for batch in batches for x in zip(batch.advantage.tolist(), batch.packed.targets.tolist(), strict=True)
    )
    wanted = sorted((float(i), t) for i in range(12) for t in rollout.tokens[i, : rollout.lengths[i]].tolist())
    assert found == wanted
    assert all(batch.packed.tokens.shape[0] <= budget or batch.packed.documents == 1 for batch in batches)


def test_a_saved_rollout_replays_into_the_identical_update() -> None:
    rollout = drawn()
    names = [path for path, _ in tree.leaves_with_path(rollout)]
    stored = load(save(dict(zip(names, tree.leaves(rollout), strict=True))))
    replayed = tree.unflatten(rollout, [stored[name] for name in names])
    assert tree.equal(rollout, replayed)
    advantages = torch.linspace(-1, 1, 12)
    gradients = []
    for source in (rollout, replayed):
        batches = experience(source, advantages, micro_tokens=30, mask_truncated=True)
        gradients.append([_gradient(batch) for batch in batches])
    assert tree.equal(*(experience(source, advantages, micro_tokens=30) for source in (rollout, replayed)))
    assert tree.equal(*gradients)
    assert max(float(leaf.abs().max()) for leaf in tree.leaves(gradients[0])) > 0


def _gradient(batch: Experience) -> Any:
    def loss(params: Any) -> torch.Tensor:
        actions = act(POLICY, SAMPLING)(params, batch)
        return -((actions.logp - actions.old).exp() * actions.advantage * actions.weight).sum()

    return value_and_grad(loss)(PARAMS)[1]


def test_how_many_tokens_a_decision_was_drawn_among_is_kept() -> None:
    rollout = drawn()
    assert rollout.kept is not None
    found, wanted = [], []
    for batch in experience(rollout, torch.arange(12.0), micro_tokens=30):
        assert batch.packed.kept is not None
        rows = zip(batch.advantage.tolist(), batch.packed.kept.tolist(), strict=True)
        found += [(int(row), kept) for row, kept in rows]
    for row, length in enumerate(rollout.lengths.tolist()):
        wanted += [(row, kept) for kept in rollout.kept[row, :length].tolist()]
    assert sorted(found) == sorted(wanted)
    assert len({kept for _, kept in wanted}) > 3
    with pytest.raises(RecordError, match=r"Rollout.kept has shape \(12, 1\), but tokens has \(12, 6\)"):
        replace(rollout, kept=rollout.kept[:, :1])


def test_a_rollout_is_drawn_again_bit_for_bit() -> None:
    assert tree.equal(drawn(), drawn())


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 99))
def test_minibatches_take_every_row_once(rows: int, count: int, seed: int) -> None:
    count = min(count, rows)
    parts = minibatches(rows, count, Key.of(seed))
    assert len(parts) == count
    assert sorted(torch.cat(parts).tolist()) == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert tree.equal(parts, minibatches(rows, count, Key.of(seed)))


def test_minibatches_are_shuffled_by_the_key() -> None:
    orders = {tuple(torch.cat(minibatches(20, 4, Key.of(seed))).tolist()) for seed in range(5)}
    assert len(orders) == 5
    with pytest.raises(DataError, match="3 sequences cannot be split into 4 mini-batches"):
        minibatches(3, 4, Key.of(0))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_minibatches_keep_the_totals(count: int) -> None:
    rollout, advantages = drawn(), torch.arange(12.0)
    parts = [
        batch
        for rows in minibatches(12, count, Key.of(1))
        for batch in experience(rollout, advantages, rows=rows, micro_tokens=25)
    ]
    assert sum(float(batch.packed.weight.sum()) for batch in parts) == float(rollout.lengths.sum())
    total = sum(float(batch.advantage.sum()) for batch in parts)
    assert total == float((advantages * rollout.lengths).sum())


@pytest.mark.parametrize("micro_tokens", [1, 25, 1000])
def test_what_a_snapshot_says_of_a_rollout_goes_to_its_decisions(micro_tokens: int) -> None:
    refer, rollout = reference_logp(POLICY, SAMPLING), drawn()
    moved = tree.map(lambda x: x * 1.5, PARAMS)
    same, other = (
        over_completions(lambda packed, params=params: refer(params, packed), rollout, micro_tokens)
        for params in (PARAMS, moved)
    )
    torch.testing.assert_close(same, rollout.logp, rtol=0, atol=1e-5)  # no KL to where the policy started
    batches = experience(rollout, torch.ones(12), micro_tokens=40, reference=other, old=same)
    for batch in batches:
        assert batch.reference is not None and batch.rollout is not None
        torch.testing.assert_close(batch.reference, refer(moved, batch.packed), rtol=0, atol=1e-5)
        torch.testing.assert_close(batch.old, batch.rollout, rtol=0, atol=1e-5)
    (plain,) = experience(rollout, torch.ones(12), micro_tokens=1000)
    assert plain.reference is None and plain.rollout is None
    assert sorted(torch.cat([b.rollout for b in batches if b.rollout is not None]).tolist()) == sorted(
        plain.old.tolist()
    )
    with pytest.raises(RecordError, match=r"reference has shape \(1,\), but the rollout's tokens \(12, "):
        experience(rollout, torch.ones(12), micro_tokens=40, reference=torch.zeros(1))
    with pytest.raises(RecordError, match=r"Experience.reference has shape \(1,\)"):
        replace(plain, reference=torch.zeros(1))


def test_an_advantage_may_belong_to_one_token() -> None:
    rollout = drawn()
    each = torch.arange(rollout.tokens.numel(), dtype=torch.float32).view(rollout.tokens.shape)
    inside = torch.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    found = torch.cat([batch.advantage for batch in experience(rollout, each, micro_tokens=30)])
    assert sorted(found.tolist()) == each[inside].tolist()


def test_the_kl_of_a_completion_is_the_sum_over_its_drawn_tokens() -> None:
    rollout = drawn()
    reference = torch.where(rollout.logp != 0, rollout.logp - 0.25, torch.nan)
    torch.testing.assert_close(completion_kl(rollout, reference), 0.25 * rollout.lengths, rtol=1e-5, atol=0)
    k2 = completion_kl(rollout, reference, "k2")
    torch.testing.assert_close(k2, 0.03125 * rollout.lengths, rtol=1e-5, atol=0)


def test_one_advantage_a_row() -> None:
    with pytest.raises(RecordError, match=r"advantages have shape \(2,\), but the rollout has 12 rows"):
        experience(drawn(), torch.zeros(2), micro_tokens=10)
