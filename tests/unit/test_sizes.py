"""Micro-batches of few sizes: how they are rounded, that padding stands apart, and that no loss and no gradient sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import Attention

from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.batch import Example, Experience, Pair
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.contracts.valued import Valued
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.token.pack import micro_batches, pack
from areno_fn.steps.token.pairs import decisions, pair_batches
from areno_fn.steps.token.score import act, compare, score
from areno_fn.steps.token.sizes import Sizes, alike, coarse, common, plan_alike, rounded
from areno_fn.steps.token.value import estimate

POLICY = Attention(max_positions=256)
PARAMS = tree.map(lambda x: x.double(), POLICY.init())


def example(row: int, prompt: int, answer: int) -> Example:
    tokens = tuple((7 * row + 3 * place) % 23 for place in range(prompt + answer))
    return Example(tokens=tokens, trained=tuple(place >= prompt for place in range(len(tokens))), row=row)


ROWS = [example(row, 1 + row % 3, (5 * row) % 9) for row in range(11)]


def test_sizes_by_hand() -> None:
    assert [rounded(n) for n in (0, 1, 16, 17, 33, 1000, 1025, 8193)] == [16, 16, 16, 17, 34, 1024, 1088, 8704]
    assert [coarse(n) for n in (1, 2, 3, 8, 9, 17, 64, 65)] == [2, 2, 4, 8, 10, 20, 64, 80]


@given(st.integers(17, 10**6))
def test_a_size_is_at_most_a_sixteenth_too_large_and_its_own(count: int) -> None:
    assert count <= rounded(count) <= count * 17 / 16 + 1
    assert rounded(rounded(count)) == rounded(count)


def test_documents_of_one_length_stay_as_they_are() -> None:
    fixed = Sizes(tokens=12 * 100, documents=12, longest=100, decisions=40)
    assert common([fixed, fixed]) == Sizes(tokens=1200, documents=12, longest=100, decisions=40)
    ragged = common([fixed, Sizes(tokens=1100, documents=11, longest=100)])
    assert (ragged.tokens, ragged.documents, ragged.longest) == (1216, 14, 128)
    alone = [common([Sizes(tokens=n, documents=1, longest=n)]) for n in (99, 101, 103, 104)]
    assert [one.tokens for one in alone] == [100, 104, 104, 104] and len({one.documents for one in alone}) == 2


shapes = st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=40), min_size=1, max_size=5)


@given(shapes)
def test_every_micro_batch_can_be_padded_to_what_they_have_in_common(batches: list[list[int]]) -> None:
    own = [Sizes(tokens=sum(x), documents=len(x), longest=max(x)) for x in batches]
    found = common(own)
    assert all(found.takes(one) and found.longest >= one.longest for one in own)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000))
def test_every_row_is_in_one_micro_batch_and_the_budget_is_kept(lengths: list[int], budget: int) -> None:
    batches = plan_alike([(length,) for length in lengths], budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    own = [Sizes(tokens=sum(x), documents=len(x), longest=max(x)) for x in ([lengths[i] for i in b] for b in batches)]
    tokens = common(own).tokens
    assert tokens <= max(budget, rounded(max(lengths) + 3)) or len(batches) == len(lengths)
    loads = [one.tokens for one in own]
    assert max(loads) - min(loads) <= max(lengths), "equal up to a row"


def test_padding_by_hand() -> None:
    (packed,) = alike([pack([example(1, 2, 3), example(2, 1, 3), example(3, 4, 8)])])
    assert (packed.documents, packed.longest, packed.tokens.shape[0]) == (4, 64, 22)
    assert packed.segments[21:].tolist() == [3] and packed.positions[21:].tolist() == [0]
    assert packed.weight.tolist() == [1.0] * 14 + [0.0, 0.0] and packed.targets[14:].tolist() == [0, 0]
    assert packed.index[14:].tolist() == [21, 20]
    several, one = alike([pack([example(1, 2, 3)] * 5), pack([example(1, 8, 26)])])
    assert several.segments.bincount().tolist() == [5] * 5 + [15]
    assert one.segments.bincount().tolist() == [34, 2, 1, 1, 1, 1] and one.documents == 6
    assert one.positions[34:].tolist() == [0, 1, 0, 0, 0, 0] and one.tokens[34:].tolist() == [0] * 6


def test_few_shapes_are_left() -> None:
    """Two hundred steps of sixty-four ragged rows have a handful of shapes; as they are, almost every one has its own."""
    source = torch.Generator().manual_seed(0)
    plain, few = set(), set()
    for _ in range(200):
        lengths = torch.randint(20, 60, (64,), generator=source).tolist()
        rows = [Example(tokens=(1,) * n, trained=(False, *[True] * (n - 1))) for n in lengths]
        for seen, padded in ((plain, False), (few, True)):
            batches = micro_batches(rows, 4096, few_sizes=padded)
            seen.add(tuple((x.tokens.shape, x.targets.shape, x.documents, x.longest) for x in batches))
    assert len(few) <= 8 and len(plain) > 100


def experienced(rows: list[Example], budget: int, few_sizes: bool) -> tuple[Experience, ...]:
    """The rows with numbers that are functions of their tokens, the third of them without weight."""

    def recorded(packed: Any) -> Experience:
        at = packed.tokens[packed.index] * 31 + packed.targets * 7 + packed.positions[packed.index]
        number = (at % 13).double() / 13
        weight = torch.where(packed.segments[packed.index] == 2, 0.0, packed.weight)
        return Experience(
            packed=replace(packed, weight=weight),
            old=-2 - number,
            advantage=number - 0.4,
            reference=-2.5 + number / 2,
            rollout=-2.1 - number,
            values=number,
            returns=1 - number,
        )

    plain = tuple(recorded(packed) for packed in micro_batches(rows, budget))
    return alike(plain) if few_sizes else plain


PAIRS = [Pair(chosen=example(i, 2, 1 + i % 5), rejected=example(i + 20, 2, 2 + i % 4)) for i in range(7)]
REFERENCES = [torch.linspace(-3, -2, decisions(pair), dtype=torch.float64) for pair in PAIRS]
CRITIC = Valued(trunk=PARAMS, head=torch.full((1, POLICY.width), 0.3, dtype=torch.float64))


def supervised(few: bool, how: str) -> tuple[Any, Any, Any]:
    stage = pipeline(score(POLICY, Sampling()), cross_entropy(how, constant=9.0))
    return stage, PARAMS, micro_batches(ROWS, 40, few_sizes=few)


def sampled(few: bool, loss: Any) -> tuple[Any, Any, Any]:
    return pipeline(act(POLICY, Sampling(temperature=0.7)), loss), PARAMS, experienced(ROWS, 40, few)


def compared(few: bool, loss: str) -> tuple[Any, Any, Any]:
    stage = pipeline(compare(POLICY, Sampling()), preference(loss=loss))
    return stage, PARAMS, pair_batches(PAIRS, REFERENCES, 30, few_sizes=few)


CASES: dict[str, Any] = {
    **{f"sft {how}": lambda few, how=how: supervised(few, how) for how in ("token_mean", "seq_mean_token_mean")},
    "grpo": lambda few: sampled(few, clipped(kl_coef=0.1, importance_cap=2.0, dual=3.0)),
    "grpo constant": lambda few: sampled(few, clipped(aggregation="constant_length", constant=7.0)),
    "gspo": lambda few: sampled(few, sequence_clipped(kl_coef=0.1)),
    "dpo": lambda few: compared(few, "sigmoid"),
    "ipo": lambda few: compared(few, "ipo"),
    "critic": lambda few: (pipeline(estimate(POLICY), value_clipped(0.2)), CRITIC, experienced(ROWS, 40, few)),
}


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_no_loss_and_no_gradient(name: str) -> None:
    found: list[tuple[Any, Sums]] = []
    for few in (False, True):
        objective, params, batches = CASES[name](few)
        found.append(accumulate(objective)(params, batches))
    (gradient, sums), (padded, also) = found
    assert float(sums.weight) == float(also.weight) > 0
    torch.testing.assert_close(sums.total, also.total, rtol=1e-12, atol=1e-12)
    for stat, values in (sums.stats | sums.peaks).items():
        torch.testing.assert_close((also.stats | also.peaks)[stat], values, rtol=1e-6, atol=1e-6, msg=stat)
    for one, other in zip(tree.leaves(gradient), tree.leaves(padded), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
    assert any(float(leaf.abs().max()) > 1e-4 for leaf in tree.leaves(gradient))


def test_truncated_decisions_are_padded_by_a_choice_of_one() -> None:
    (plain,) = micro_batches(ROWS[:3], 100)
    (padded,) = alike([replace(plain, kept=torch.full_like(plain.targets, 5))])
    assert padded.kept is not None and padded.kept[plain.targets.shape[0] :].unique().tolist() == [1]
