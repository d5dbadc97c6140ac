"""Laws of the losses over pairs: exact under any split, blind to order and masks, with the gradient of their value."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from areno_fn import tree
from areno_fn.contracts.actions import Comparisons
from areno_fn.steps.compose import Objective, accumulate, pipeline
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.reduce import finish
from areno_fn.testing import laws

Batch = dict[str, torch.Tensor]
FEATURES = 3


def compared(params: Batch, batch: Batch) -> Comparisons:
    """A toy policy: a log-probability per decision, or `junk` where the decision is masked."""
    logp = -(batch["x"] @ params["w"] + params["b"]).square()
    if "junk" in batch:
        logp = torch.where(batch["weight"] == 0, batch["junk"], logp)
    return Comparisons(
        logp=logp,
        weight=batch["weight"],
        segments=batch["segments"],
        entropy=logp.detach(),
        reference=batch["reference"],
        documents=int(batch["documents"]),
    )


OBJECTIVES: dict[str, Objective] = {
    "sigmoid": pipeline(compared, preference(0.5)),
    "label smoothing": pipeline(compared, preference(0.5, label_smoothing=0.2)),
    "ipo": pipeline(compared, preference(0.5, loss="ipo")),
    "hinge": pipeline(compared, preference(0.5, loss="hinge")),
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Batch, list[Batch]]:
    """Parameters, and pairs of answers of 1 to 4 decisions, some of which do not count."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    params = {"w": 0.5 * normal(FEATURES), "b": normal(1)[0]}
    pairs = []
    for size in sizes:
        count = sum(size)
        live = draw(st.lists(st.sampled_from([0.0, 1.0, 1.0]), min_size=count, max_size=count))
        pairs.append(
            {
                "x": normal(count, FEATURES),
                "weight": torch.tensor(live, dtype=torch.float64),
                "reference": -normal(count).square(),
                "segments": torch.arange(2).repeat_interleave(torch.tensor(size)),
                "documents": torch.tensor(2),
            }
        )
    return params, pairs


def together(pairs: list[Batch]) -> Batch:
    """Pairs laid end to end."""
    joined = {name: torch.cat([pair[name] for pair in pairs]) for name in ("x", "weight", "reference")}
    segments = torch.cat([pair["segments"] + 2 * number for number, pair in enumerate(pairs)])
    return {**joined, "segments": segments, "documents": torch.tensor(2 * len(pairs))}


def close(first: Any, second: Any) -> None:
    torch.testing.assert_close(tree.leaves(first), tree.leaves(second), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(problem=problems(), data=st.data())
def test_any_split_into_micro_batches_is_exact(
    name: str, problem: tuple[Batch, list[Batch]], data: st.DataObject
) -> None:
    params, pairs = problem
    places = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=len(pairs), max_size=len(pairs)))
    parts = [[p for p, at in zip(pairs, places, strict=True) if at == part] for part in sorted(set(places))]
    splits = [[together(part) for part in parts], pairs]
    laws.exact_under_split(OBJECTIVES[name], params, together(pairs), *splits, tolerance=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(problem=problems(), data=st.data())
def test_the_order_of_decisions_and_pairs_does_not_matter(
    name: str, problem: tuple[Batch, list[Batch]], data: st.DataObject
) -> None:
    params, pairs = problem
    batch = together(pairs)
    order = torch.tensor(data.draw(st.permutations(range(len(batch["weight"])))))
    numbers = torch.tensor(data.draw(st.permutations(range(len(pairs)))))
    shuffled = {k: v[order] if v.ndim else v for k, v in batch.items()}
    shuffled["segments"] = 2 * numbers[shuffled["segments"] // 2] + shuffled["segments"] % 2
    derive = accumulate(OBJECTIVES[name])
    (first, first_sums), (second, second_sums) = derive(params, (batch,)), derive(params, (shuffled,))
    close(first, second)
    close(first_sums, second_sums)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(problem=problems(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_what_is_masked_changes_nothing(name: str, problem: tuple[Batch, list[Batch]], junk: float) -> None:
    """Bit for bit, in loss, gradient and every metric; and with everything masked all of them are 0."""
    params, pairs = problem
    batch = together(pairs)
    dead = batch["weight"] == 0
    dirty = {**batch, "reference": batch["reference"].masked_fill(dead, junk)}
    dirty["junk"] = torch.tensor(junk, dtype=torch.float64)
    derive = accumulate(OBJECTIVES[name])
    assert tree.equal(derive(params, (batch,)), derive(params, (dirty,)))
    gradient, sums = derive(params, ({**dirty, "weight": torch.zeros_like(batch["weight"])},))
    assert all((leaf == 0).all() for leaf in tree.leaves(gradient)) and set(finish(sums).values()) == {0.0}


@pytest.mark.parametrize("name", ["sigmoid", "label smoothing", "ipo"])
@given(problem=problems())
def test_the_gradient_is_that_of_the_value(name: str, problem: tuple[Batch, list[Batch]]) -> None:
    params, pairs = problem
    laws.gradient(OBJECTIVES[name], params, together(pairs), tolerance=1e-5)
