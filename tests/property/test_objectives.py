"""Laws of every objective: exact under any split, blind to order and to what is masked."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from areno_fn import tree
from areno_fn.contracts.actions import Actions, Scores, Sums
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import Objective, accumulate, pipeline
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.reduce import aggregate, finish
from areno_fn.testing import laws

HOWS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length")
Batch = dict[str, torch.Tensor]
FEATURES = 3


def scores(params: Batch, batch: Batch) -> Scores:
    """A toy policy: a log-probability per decision, or `junk` where the decision is masked."""
    logp = -(batch["x"] @ params["w"] + params["b"]).square()
    if "junk" in batch:
        logp = torch.where(batch["weight"] == 0, batch["junk"], logp)
    return Scores(
        logp=logp,
        weight=batch["weight"],
        segments=batch["segments"],
        entropy=logp.detach(),
        documents=int(batch["documents"]),
    )


def acted(params: Batch, batch: Batch) -> Actions:
    s = scores(params, batch)
    return Actions(
        logp=s.logp,
        weight=s.weight,
        segments=s.segments,
        entropy=s.entropy,
        documents=s.documents,
        old=batch["old"],
        advantage=batch["advantage"],
        reference=batch["reference"],
        rollout=batch["rollout"],
    )


OBJECTIVES: dict[str, Objective] = {
    **{f"cross_entropy {how}": pipeline(scores, cross_entropy(how, 4.0)) for how in HOWS},
    **{
        f"clipped {how}": pipeline(acted, clipped(0.2, 0.28, aggregation=how, constant=4.0, kl_coef=0.1))
        for how in HOWS
    },
    "clipped dual": pipeline(acted, clipped(0.2, 0.28, dual=1.1, importance_cap=1.5)),
    "sequence_clipped": pipeline(acted, sequence_clipped(0.05, 0.1, kl_coef=0.1)),
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Batch, list[Batch]]:
    """Parameters, and documents of 1 to 5 decisions, some of which do not count."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    params = {"w": 0.5 * normal(FEATURES), "b": normal(1)[0]}
    documents = []
    for length in lengths:
        weight = torch.tensor(
            draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=length, max_size=length)), dtype=torch.float64
        )
        document = {
            "x": normal(length, FEATURES),
            "weight": weight,
            "reference": normal(length),
            "rollout": normal(length),
            "advantage": normal(length),
        }
        one = {**document, "segments": torch.zeros(length, dtype=torch.int64), "documents": torch.tensor(1)}
        documents.append({**one, "old": scores(params, one).logp + 0.3 * normal(length)})
    return params, documents


def together(documents: list[Batch]) -> Batch:
    """Documents laid end to end."""
    names = ("x", "weight", "reference", "advantage", "old", "rollout")
    joined = {name: torch.cat([d[name] for d in documents]) for name in names}
    lengths = torch.tensor([len(d["weight"]) for d in documents])
    segments = torch.repeat_interleave(torch.arange(len(documents)), lengths)
    return {**joined, "segments": segments, "documents": torch.tensor(len(documents))}


def close(first: Any, second: Any) -> None:
    torch.testing.assert_close(tree.leaves(first), tree.leaves(second), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(problem=problems(), data=st.data())
def test_any_split_into_micro_batches_is_exact(
    name: str, problem: tuple[Batch, list[Batch]], data: st.DataObject
) -> None:
    params, documents = problem
    places = st.integers(0, len(documents) - 1)
    assignment = data.draw(st.lists(places, min_size=len(documents), max_size=len(documents)))
    micro = [[d for d, a in zip(documents, assignment, strict=True) if a == part] for part in sorted(set(assignment))]
    derive = accumulate(OBJECTIVES[name])
    whole, whole_sums = derive(params, (together(documents),))
    parts, parts_sums = derive(params, tuple(together(m) for m in micro))
    close(parts, whole)
    assert finish(parts_sums) == pytest.approx(finish(whole_sums), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(problem=problems(), data=st.data())
def test_the_order_of_decisions_and_documents_does_not_matter(
    name: str, problem: tuple[Batch, list[Batch]], data: st.DataObject
) -> None:
    params, documents = problem
    batch = together(documents)
    order = torch.tensor(data.draw(st.permutations(range(len(batch["weight"])))))
    numbers = torch.tensor(data.draw(st.permutations(range(len(documents)))))
    shuffled = {k: v[order] if v.ndim else v for k, v in batch.items()}
    shuffled["segments"] = numbers[shuffled["segments"]]
    derive = accumulate(OBJECTIVES[name])
    (first, first_sums), (second, second_sums) = derive(params, (batch,)), derive(params, (shuffled,))
    close(first, second)
    close(first_sums, second_sums)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(problem=problems(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 0.0]))
def test_what_is_masked_changes_nothing(name: str, problem: tuple[Batch, list[Batch]], junk: float) -> None:
    """Bit for bit, in loss, gradient and every metric."""
    params, documents = problem
    batch = together(documents)
    dead = batch["weight"] == 0
    dirty = {
        k: v.masked_fill(dead, junk) if k in ("old", "advantage", "reference", "rollout") else v
        for k, v in batch.items()
    }
    dirty["junk"] = torch.tensor(junk, dtype=torch.float64)
    derive = accumulate(OBJECTIVES[name])
    assert tree.equal(derive(params, (batch,)), derive(params, (dirty,)))


@given(problem=problems())
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_masked_decision_is_as_good_as_none(name: str, problem: tuple[Batch, list[Batch]]) -> None:
    params, documents = problem
    batch = together(documents)
    live = batch["weight"] != 0
    without = {k: v[live] if v.ndim else v for k, v in batch.items()}
    derive = accumulate(OBJECTIVES[name])
    (first, first_sums), (second, second_sums) = derive(params, (batch,)), derive(params, (without,))
    close(first, second)
    close(first_sums, second_sums)
    if not live.any():
        assert all((leaf == 0).all() for leaf in tree.leaves(first)) and set(finish(first_sums).values()) == {0.0}


def by_loops(values: list[float], weight: list[float], segments: list[int], how: str, constant: float) -> float:
    """The definition of every aggregation, one decision at a time in Python floats."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for v, w, s in zip(values, weight, segments, strict=True):
        if w:
            rows.setdefault(s, []).append((v, w))
    if not rows:
        return 0.0
    if how == "token_mean":
        pairs = [pair for row in rows.values() for pair in row]
        return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
    fixed = {"seq_mean_token_sum": 1.0, "constant_length": constant}
    divisors = {s: fixed.get(how) or math.fsum(w for _, w in row) for s, row in rows.items()}
    return math.fsum(math.fsum(v * w for v, w in row) / divisors[s] for s, row in rows.items()) / len(rows)


@pytest.mark.parametrize("how", HOWS)
@given(
    rows=st.lists(
        st.tuples(st.floats(-100, 100), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 4)),
        min_size=1,
        max_size=20,
    )
)
def test_aggregate_is_its_definition(how: str, rows: list[tuple[float, float, int]]) -> None:
    values, weight, segments = (list(column) for column in zip(*rows, strict=True))
    total, denominator = aggregate(
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(weight, dtype=torch.float64),
        torch.tensor(segments),
        5,
        how,
        3.0,
    )
    found = finish(Sums(total=total, weight=denominator, stats={}, peaks={}))["train/loss"]
    assert found == pytest.approx(by_loops(values, weight, segments, how, 3.0), rel=1e-12, abs=1e-12)


@settings(max_examples=25)
@given(problem=problems(), name=st.sampled_from([name for name in OBJECTIVES if name != "clipped dual"]))
def test_the_gradient_is_that_of_the_value(name: str, problem: tuple[Batch, list[Batch]]) -> None:
    """Where no bound is near, since a difference across one is not a derivative."""
    params, documents = problem
    batch = together(documents)
    near = scores(params, batch).logp - 0.01
    laws.gradient(OBJECTIVES[name], params, {**batch, "old": near, "rollout": near}, step=1e-6, tolerance=1e-4)


# ------------------------------------------------------------------------------------------ advantages

rewards_and_groups = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(-3, 3)), min_size=1, max_size=12).map(
    lambda rows: ([float(r) for r, _ in rows] * 2, [g for _, g in rows] * 2)
)  # twice: no group of one


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(problem=rewards_and_groups, data=st.data())
def test_advantages_move_with_their_rows(
    scale: str, baseline: str, problem: tuple[list[float], list[int]], data: st.DataObject
) -> None:
    rewards, groups = torch.tensor(problem[0]), torch.tensor(problem[1])
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    first = group_advantages(rewards, groups, baseline=baseline, scale=scale)[order]
    second = group_advantages(rewards[order], groups[order], baseline=baseline, scale=scale)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(problem=rewards_and_groups)
def test_advantages_are_centred_and_scaled(scale: str, problem: tuple[list[float], list[int]]) -> None:
    rewards, groups = torch.tensor(problem[0], dtype=torch.float64), torch.tensor(problem[1])
    found = group_advantages(rewards, groups, scale=scale)
    for group in groups.unique():
        rows = groups == group
        assert abs(found[rows].mean().item()) < 1e-6
        spread = rewards[rows].std(correction=0).item()
        divisor = {"group": spread, "batch": rewards.std(correction=0).item(), "none": 1 - 1e-8}[scale] + 1e-8
        expected = (rewards[rows] - rewards[rows].mean()) / divisor
        if rewards[rows].unique().numel() == 1:
            assert found[rows].tolist() == [0.0] * int(rows.sum())
        else:
            torch.testing.assert_close(found[rows], expected, rtol=1e-6, atol=1e-6)
