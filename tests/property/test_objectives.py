"""Laws of every objective: exact under any split, blind to order and to what is masked, with the gradient of its value."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from objective_toys import DATA, HOWS, OBJECTIVES, PAIRED, Batch, problems, row, some_params, together

from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import accumulate
from areno_fn.steps.reduce import aggregate, finish
from areno_fn.testing import laws

Problem = tuple[Batch, list[Batch]]
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def width(name: str) -> int:
    """Documents of what must stay together."""
    return 2 if name in PAIRED else 1


def close(first: Any, second: Any) -> None:
    torch.testing.assert_close(tree.leaves(first), tree.leaves(second), rtol=1e-9, atol=1e-12)


@every_objective
@settings(max_examples=25)
@given(data=st.data())
def test_any_split_into_micro_batches_is_exact(name: str, data: st.DataObject) -> None:
    params, rows = data.draw(problems(width(name)))
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=len(rows), max_size=len(rows)))
    parts = [[r for r, at in zip(rows, places, strict=True) if at == part] for part in sorted(set(places))]
    assume(OBJECTIVES[name](params, together(rows)).weight > 0)  # of nothing there is nothing to compare
    laws.exact_under_split(
        OBJECTIVES[name], params, together(rows), [together(part) for part in parts], rows, tolerance=1e-9
    )


@every_objective
@settings(max_examples=25)
@given(data=st.data())
def test_the_order_of_decisions_and_rows_does_not_matter(name: str, data: st.DataObject) -> None:
    params, rows = data.draw(problems(width(name)))
    batch, wide = together(rows), width(name)
    order = torch.tensor(data.draw(st.permutations(range(len(batch["weight"])))))
    numbers = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    shuffled = {k: v[order] if v.ndim else v for k, v in batch.items()}
    shuffled["segments"] = wide * numbers[shuffled["segments"] // wide] + shuffled["segments"] % wide
    derive = accumulate(OBJECTIVES[name])
    (first, first_sums), (second, second_sums) = derive(params, (batch,)), derive(params, (shuffled,))
    close(first, second)
    close(first_sums, second_sums)


@every_objective
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e300])
def test_with_everything_masked_all_is_zero(name: str, junk: float) -> None:
    """Loss, gradient and every metric, whatever stands there; `test_masks.py` masks a part."""
    source = torch.Generator().manual_seed(0)
    params = some_params(source)
    batch = together([row([2] * width(name), [0.0] * 2 * width(name), source, params) for _ in range(3)])
    dirty = {k: torch.full_like(v, junk) if k in DATA else v for k, v in batch.items()}
    dirty["junk"] = torch.tensor(junk, dtype=torch.float64)
    gradient, sums = accumulate(OBJECTIVES[name])(params, (dirty,))
    assert all((leaf == 0).all() for leaf in tree.leaves(gradient)) and set(finish(sums).values()) == {0.0}


@every_objective
@settings(max_examples=25)
@given(data=st.data())
def test_a_masked_decision_is_as_good_as_none(name: str, data: st.DataObject) -> None:
    params, rows = data.draw(problems(width(name)))
    batch = together(rows)
    live = batch["weight"] != 0
    without = {k: v[live] if v.ndim else v for k, v in batch.items()}
    derive = accumulate(OBJECTIVES[name])
    (first, first_sums), (second, second_sums) = derive(params, (batch,)), derive(params, (without,))
    close(first, second)
    close(first_sums, second_sums)


@every_objective
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    """At fixed points, none of which is so near a bound that a difference crosses it; bounds that bind are among them."""
    bound = 0.0
    for seed in range(4):
        source = torch.Generator().manual_seed(seed)
        params = some_params(source)
        batch = together([row([3] * width(name), [1.0] * 3 * width(name), source, params) for _ in range(5)])
        laws.gradient(OBJECTIVES[name], params, batch, step=1e-6, tolerance=1e-7)
        bound += finish(OBJECTIVES[name](params, batch)).get("train/clip_fraction", 0.5) / 4
    assert 0 < bound < 1


# ------------------------------------------------------------------------------------------ aggregate


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


# ------------------------------------------------------------------------------------------ advantages

rewards_and_groups = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(-3, 3)), min_size=1, max_size=12).map(
    lambda rows: ([float(r) for r, _ in rows] * 2, [g for _, g in rows] * 2)
)  # twice: no group of one


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [
        (baseline, scale)
        for baseline in ("group", "leave_one_out", "batch")
        for scale in ("group", "batch", "none")
        if (baseline, scale) != ("batch", "group")
    ],
)
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
