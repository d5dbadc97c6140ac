"""Packing: which tokens are decisions, where they stand, and how documents share micro-batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import Attention

from areno_fn.contracts.batch import Example
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.pack import micro_batches, pack, plan
from areno_fn.steps.token.score import score


def example(tokens: list[int], prompt: int, row: int = 0) -> Example:
    return Example(tokens=tuple(tokens), trained=tuple(i >= prompt for i in range(len(tokens))), row=row)


def test_D1_the_first_response_token_is_a_target() -> None:
    packed = pack([example([11, 12, 13, 14], prompt=2)])
    assert packed.targets.tolist() == [13, 14]
    assert packed.index.tolist() == [1, 2]
    assert packed.weight.tolist() == [1.0, 1.0]


def test_D2_an_end_token_that_equals_the_padding_is_still_a_target() -> None:
    packed = pack([example([5, 2, 2, 2][:2], prompt=1)])  # length 2: the rest was padding
    assert packed.tokens.tolist() == [5, 2]
    assert packed.targets.tolist() == [2]


def test_D2_the_mask_does_not_read_values() -> None:
    flags = (False, True, False, True)
    for tokens in ((5, 2, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0)):
        packed = pack([Example(tokens=tokens, trained=flags)])
        assert packed.index.tolist() == [0, 2]


def test_D9_positions_start_again_and_documents_are_isolated_bit_for_bit() -> None:
    policy = Attention()
    params = policy.init()
    hidden = []
    for first in (1, 7):
        packed = pack([example([first, 2], prompt=1), example([3, 4], prompt=1)])
        assert packed.positions.tolist() == [0, 1, 0, 1]
        assert packed.segments.tolist() == [0, 0, 1, 1]
        hidden.append(policy.hidden(params, packed.tokens, packed.positions, packed.segments))
    assert not torch.equal(hidden[0][:2], hidden[1][:2])
    assert torch.equal(hidden[0][2:], hidden[1][2:])


def test_D9_the_packed_loss_is_the_sum_of_the_separate_ones() -> None:
    policy = Attention()
    params = policy.init()
    rows = [example([1, 2, 9], prompt=1), example([3, 4, 4, 8], prompt=2)]
    stage = score(policy, Sampling())
    whole = stage(params, pack(rows)).logp
    apart = torch.cat([stage(params, pack([row])).logp for row in rows])
    torch.testing.assert_close(whole, apart, rtol=0, atol=1e-6)


def test_D10_no_document_predicts_the_next() -> None:
    packed = pack([example([1, 2], prompt=1), example([3, 4], prompt=1)])
    assert packed.index.tolist() == [0, 2]
    assert packed.targets.tolist() == [2, 4]
    assert torch.equal(packed.segments[packed.index], packed.segments[packed.index + 1])


def test_a_row_without_trained_tokens_is_carried_and_adds_nothing() -> None:
    packed = pack([example([1, 2, 3], prompt=3), example([4, 5], prompt=1)])
    assert packed.documents == 2 and packed.longest == 3
    assert packed.targets.tolist() == [5]
    alone = pack([example([1, 2, 3], prompt=3)])
    assert alone.index.shape == alone.targets.shape == alone.weight.shape == (0,)
    assert alone.index.dtype == alone.targets.dtype == torch.int64
    scores = score(Attention(), Sampling())(Attention().init(), alone)
    assert scores.logp.shape == (0,)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "nothing to pack"),
        ([Example(tokens=(), trained=(), row=3)], "row 3 has no tokens"),
        ([Example(tokens=(1, 2), trained=(False,), row=4)], "row 4 has 2 tokens and 1 flags"),
        ([Example(tokens=(1, 2), trained=(True, True), row=5)], "row 5 trains on its first token"),
    ],
)
def test_rows_that_cannot_be_packed_are_named(rows: list[Example], words: str) -> None:
    with pytest.raises(DataError, match=words):
        pack(rows)


def test_plan_by_hand() -> None:
    assert plan([3, 9, 2, 3, 1], 6) == [[1], [0, 3], [2, 4]]
    assert plan([], 6) == []
    with pytest.raises(DataError, match="micro_tokens=0"):
        plan([1], 0)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_plan_keeps_documents_whole_and_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(lengths, reverse=True)
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
    for one, two in pairwise(batches):  # no batch was closed while the next row still fitted
        assert sum(lengths[i] for i in one) + lengths[two[0]] > budget


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12), st.integers(1, 30))
def test_micro_batches_hold_every_decision_once(shapes: list[tuple[int, int]], budget: int) -> None:
    rows = [example([100 * i + j for j in range(p + r)], prompt=p) for i, (p, r) in enumerate(shapes)]
    batches = micro_batches(rows, budget)
    decided = sorted((int(b.tokens[i]), int(t)) for b in batches for i, t in zip(b.index, b.targets, strict=True))
    wanted = sorted((row.tokens[j - 1], row.tokens[j]) for row in rows for j, on in enumerate(row.trained) if on)
    assert decided == wanted
    for batch in batches:
        assert batch.longest == int(batch.segments.bincount().max())
        assert batch.documents == int(batch.segments.max()) + 1
