"""Losses over pairs against hand-worked numbers and a plain float64 implementation; pairs in micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import Attention

from areno_fn import tree
from areno_fn.contracts.actions import Comparisons
from areno_fn.contracts.batch import Example, Pair, Pairs
from areno_fn.contracts.errors import DataError, RecordError, SpecError
from areno_fn.contracts.spec import Sampling
from areno_fn.engine.references import References
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.reduce import finish, measure
from areno_fn.steps.token.pairs import pack_pairs, pair_batches
from areno_fn.steps.token.score import compare, reference_logp

F64 = torch.float64
TABLE = 5e-8
POLICY = Attention()
PARAMS = tree.map(lambda x: x.double(), POLICY.init())
START = tree.map(lambda x: x.double(), POLICY.init(seed=7))


def loss_and_grad(stage: Any, chosen: Any, rejected: Any, ref: Any) -> tuple[float, list[float], dict[str, float]]:
    """Loss of one pair, its gradient in logp, and the metrics."""
    point = torch.tensor([*chosen, *rejected], dtype=F64).requires_grad_()
    segments = torch.tensor([0] * len(chosen) + [1] * len(rejected))
    ones = torch.ones(len(point), dtype=F64)
    reference = torch.tensor(ref, dtype=F64).expand(len(point))
    sums = stage(
        Comparisons(logp=point, weight=ones, segments=segments, entropy=ones, reference=reference, documents=2)
    )
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    return (
        (sums.total / sums.weight).item(),
        gradient.tolist(),
        {name: float(value.detach()) for name, value in measure(sums).items()},
    )


def test_dpo_of_the_table() -> None:
    loss, gradient, metrics = loss_and_grad(preference(1.0), (-0.1, -0.1), (-1.0, -1.0), -0.2)
    assert loss == pytest.approx(0.15297762, abs=TABLE)
    assert gradient == pytest.approx([-0.14185107] * 2 + [0.14185107] * 2, abs=TABLE)
    assert metrics["dpo/margin"] == pytest.approx(1.8) and metrics["dpo/accuracy"] == 1.0
    assert metrics["dpo/chosen_reward"] == pytest.approx(0.2)
    assert metrics["dpo/rejected_reward"] == pytest.approx(-1.6)


@pytest.mark.parametrize(("smoothing", "value"), [(0.0, 0.22041743), (0.1, 0.36041743)])
def test_dpo_of_a_margin_of_1_4(smoothing: float, value: float) -> None:
    loss, _, _ = loss_and_grad(preference(1.0, label_smoothing=smoothing), (-1.0,), (-2.4,), -1.0)
    assert loss == pytest.approx(value, abs=TABLE)


def test_L18_equal_log_probabilities_give_ln_2_and_the_pair_of_the_row_its_value() -> None:
    _, _, metrics = loss_and_grad(preference(0.1), (-0.3, -2.0), (-0.7,), [-0.3, -2.0, -0.7])
    assert metrics["dpo/accuracy"] == 0.0 == metrics["dpo/margin"]
    assert loss_and_grad(preference(0.1), (-1.5,), (-1.5,), -1.5)[0] == math.log(2)
    loss, gradient, _ = loss_and_grad(preference(0.1), (-10.0,), (-12.0,), -11.0)
    assert loss == pytest.approx(0.5981389, abs=TABLE)
    slope = 0.1 / (1 + math.exp(0.2))
    assert gradient == pytest.approx([-slope, slope], abs=1e-12)


@pytest.mark.parametrize(
    ("loss", "beta", "chosen", "rejected", "value", "slope"),
    [
        ("ipo", 1.0, (-0.1, -0.1), (-1.0, -1.0), 0.16, (0.4, -0.4)),  # means .1 and -.8: (.9 - .5)^2
        ("ipo", 0.1, (-0.2,), (-0.2, -0.2), 25.0, (-10.0, 5.0)),
        ("hinge", 1.0, (-0.1, -0.1), (-1.0, -1.0), 0.0, (0.0, 0.0)),
        ("hinge", 0.5, (-0.1, -0.1), (-1.0, -1.0), 0.1, (-0.5, 0.5)),  # x = .9
        ("hinge", 0.5, (-0.2,), (-0.2,), 1.0, (-0.5, 0.5)),
    ],
)
def test_ipo_and_hinge(loss: Any, beta: float, chosen: Any, rejected: Any, value: float, slope: Any) -> None:
    found, gradient, _ = loss_and_grad(preference(beta, loss=loss), chosen, rejected, -0.2)
    assert found == pytest.approx(value, abs=1e-12)
    expected = [slope[0]] * len(chosen) + [slope[1]] * len(rejected)
    assert gradient == pytest.approx(expected, abs=1e-12)


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(SpecError, match="preference loss 'simpo' does not exist; choose one of sigmoid, ipo, hinge"):
        preference(loss="simpo")
    with pytest.raises(SpecError, match="beta > 0, received 0"):
        preference(0)
    for loss, smoothing in (("sigmoid", 0.5), ("ipo", 0.1)):
        with pytest.raises(SpecError, match="label_smoothing from 0 to below 0.5"):
            preference(loss=loss, label_smoothing=smoothing)
    fields = {"logp": torch.ones(2), "weight": torch.ones(2), "segments": torch.arange(2), "entropy": torch.ones(2)}
    with pytest.raises(RecordError, match="it is data of a frozen reference"):
        preference()(Comparisons(**fields, reference=torch.ones(2, requires_grad=True), documents=2))
    with pytest.raises(RecordError, match="even number of documents, received 3"):
        Comparisons(**fields, reference=torch.ones(2), documents=3)


# ------------------------------------------------------------------------------------------ pairs in micro-batches


def document(tokens: list[int], prompt: int, row: int) -> Example:
    return Example(tokens=tuple(tokens), trained=tuple(i >= prompt for i in range(len(tokens))), row=row)


def some_pairs(count: int = 7) -> list[Pair]:
    source = torch.Generator().manual_seed(3)
    pairs = []
    for row in range(count):
        prompt, *answers = torch.randint(1, 6, (3,), generator=source).tolist()
        tokens = torch.randint(0, POLICY.vocab_size, (prompt + sum(answers),), generator=source).tolist()
        before, first, second = tokens[:prompt], tokens[prompt : prompt + answers[0]], tokens[prompt + answers[0] :]
        pairs.append(
            Pair(chosen=document(before + first, prompt, row), rejected=document(before + second, prompt, row))
        )
    return pairs


PAIRS = some_pairs()
OBJECTIVE = pipeline(compare(POLICY, Sampling()), preference(0.5, label_smoothing=0.1))


def references(pairs: list[Pair], micro_tokens: int = 1000) -> list[torch.Tensor]:
    refer = reference_logp(POLICY, Sampling())
    return References(pairs, micro_tokens).of(range(len(pairs)), lambda packed: refer(START, packed))


def answer_logp(params: Any, example: Example) -> torch.Tensor:
    """The log-probabilities of an answer's tokens, the document alone."""
    tokens = torch.tensor(example.tokens)
    places = torch.arange(len(tokens))
    logp = POLICY.logits(params, POLICY.hidden(params, tokens, places, torch.zeros_like(places))).log_softmax(-1)
    return torch.stack([logp[i - 1, tokens[i]] for i in range(len(tokens)) if example.trained[i]])


def plain(params: Any, loss: str, beta: float, smoothing: float) -> torch.Tensor:
    """The mean loss of `PAIRS`, one pair at a time."""
    terms = []
    for pair in PAIRS:
        sides = []
        for example in pair.documents:
            change = answer_logp(params, example) - answer_logp(START, example)
            sides.append(change.mean() if loss == "ipo" else change.sum())
        x = beta * (sides[0] - sides[1])
        right, swapped = torch.log1p(torch.exp(-x)), torch.log1p(torch.exp(x))
        terms.append(
            {
                "sigmoid": (1 - smoothing) * right + smoothing * swapped,
                "ipo": (x / beta - 0.5 / beta) ** 2,
                "hinge": torch.clamp(1 - x, min=0),
            }[loss]
        )
    return torch.stack(terms).mean()


@pytest.mark.parametrize(
    ("loss", "beta", "smoothing"),
    [("sigmoid", 0.1, 0.0), ("sigmoid", 0.5, 0.1), ("ipo", 0.3, 0.0), ("hinge", 0.2, 0.0)],
)
@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_value_and_gradient_are_those_of_a_plain_implementation(
    loss: Any, beta: float, smoothing: float, micro_tokens: int
) -> None:
    stage = preference(beta, loss=loss, label_smoothing=smoothing)
    batches = pair_batches(PAIRS, references(PAIRS), micro_tokens)
    gradient, sums = accumulate(pipeline(compare(POLICY, Sampling()), stage))(PARAMS, batches)
    point = tree.map(lambda x: x.detach().requires_grad_(), PARAMS)
    expected = plain(point, loss, beta, smoothing)
    assert (sums.total / sums.weight).item() == pytest.approx(expected.item(), rel=1e-10)
    slopes = torch.autograd.grad(expected, tree.leaves(point))
    torch.testing.assert_close(tree.leaves(gradient), list(slopes), rtol=1e-8, atol=1e-11)


def test_actor_and_reference_alike_start_at_ln_2() -> None:
    batches = pair_batches(PAIRS, references(PAIRS), 1000)
    gradient, sums = accumulate(pipeline(compare(POLICY, Sampling()), preference()))(START, batches)
    assert finish(sums)["train/loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert any((leaf != 0).any() for leaf in tree.leaves(gradient))


@given(micro_tokens=st.integers(1, 60))
def test_a_pair_is_never_split(micro_tokens: int) -> None:
    batches = pair_batches(PAIRS, references(PAIRS), micro_tokens)
    rows = [_rows(batch) for batch in batches]
    assert all(row[0::2] == row[1::2] for row in rows), "document 2k and 2k + 1 begin with one prompt"
    assert sorted(prompt for row in rows for prompt in row[0::2]) == sorted(_prompt(p.chosen) for p in PAIRS)
    for batch in batches:
        assert len(batch.packed.tokens) <= micro_tokens or batch.packed.documents == 2


def _prompt(example: Example) -> tuple[int, ...]:
    return example.tokens[: example.trained.index(True)]


def _rows(batch: Pairs) -> list[tuple[int, ...]]:
    """The prompt of every document."""
    first = {}
    for place, segment in zip(
        batch.packed.index.tolist(), batch.packed.segments[batch.packed.index].tolist(), strict=True
    ):
        first.setdefault(segment, place)
    starts = {s: batch.packed.segments.tolist().index(s) for s in first}
    tokens = batch.packed.tokens.tolist()
    return [tuple(tokens[starts[s] : first[s] + 1]) for s in sorted(first)]


def test_a_reference_must_fit_its_pair() -> None:
    with pytest.raises(DataError, match=r"row 0 has \d+ decisions, but its reference has shape \(1,\)"):
        pair_batches(PAIRS[:1], [torch.zeros(1)], 100)
    packed = pack_pairs(PAIRS[:1])
    with pytest.raises(RecordError, match="Pairs.reference has shape"):
        Pairs(packed=packed, reference=torch.zeros(99))


def test_a_reference_is_computed_once_and_does_not_depend_on_who_asks() -> None:
    calls: list[int] = []
    refer = reference_logp(POLICY, Sampling())

    def compute(packed: Any) -> torch.Tensor:
        calls.append(packed.documents // 2)
        return refer(START, packed)

    known = References(PAIRS, 25)
    first = known.of([3, 0], compute)
    every = known.of(range(len(PAIRS)), compute)
    assert sum(calls) == len(PAIRS), "every pair once"
    count = len(calls)
    assert tree.equal(known.of([3, 0], compute), first) and len(calls) == count
    assert tree.equal(References(PAIRS, 25).of([5], compute), [every[5]])
    for pair, found in zip(PAIRS, every, strict=True):
        alone = torch.cat([answer_logp(START, example) for example in pair.documents])
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)
