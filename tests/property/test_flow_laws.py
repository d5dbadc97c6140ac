"""Objectives of noised samples on a model: sums that add up, gradients of values, and rows that do not matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flow_models import SHAPE, Field, numbers, parameters, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.flow_batch import Noised, Velocities
from areno_fn.contracts.key import Key
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.flow.objectives.decoupled import advantage_weighted, centred_reward, diffusion_nft
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.objectives.preference import diffusion_dpo, group_preference
from areno_fn.steps.flow.path import noised, predict, remember, rows_of
from areno_fn.steps.flow.times import Times
from areno_fn.testing import laws

POLICY, PARAMS = Field(), parameters()
ROWS = 8

SMOOTH: dict[str, Callable[[Velocities], Sums]] = {
    "sft": velocity_matching("cosmap"),
    "nft": diffusion_nft(0.5, adaptive=False, kl_coef=0.1),
    "awm": advantage_weighted("huber", 0.9, 0.9, kl_coef=0.1, average_kl_coef=0.1),
    "dpo": diffusion_dpo(10.0),
    "strict": group_preference(1.0, strict=True, anchor=0.1, kl_coef=0.1),
}
HELD: dict[str, Callable[[Velocities], Sums]] = {
    "nft_adaptive": diffusion_nft(),
    "dgpo": group_preference(10.0, trust=0.01),
    "crd": centred_reward(temperature=0.3),
}


def batch(seed: int = 0, terms: int = 1, guidance: float = 1.0) -> tuple[Noised, ...]:
    """Samples in groups of two, which share level and noise, with advantages of both signs in each."""
    given = prompts(ROWS, negative=True)
    shared = torch.arange(ROWS) // 2
    advantage = numbers("advantage", ROWS).abs() * torch.tensor([1.0, -1.0] * (ROWS // 2))
    batches = noised(
        numbers("clean", ROWS, *SHAPE), given.conditions, given.ids, Key.of(seed), Times(low=0.05, high=0.95),
        terms=terms, shared=shared, advantage=advantage, groups=shared, guidance=guidance,
    )  # fmt: skip
    frozen = {name: parameters(name) for name in ("old", "reference", "average")}
    return tuple(remember(POLICY, b, **frozen) for b in batches)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_gradients_are_those_of_values(name: str, guidance: float) -> None:
    laws.gradient(pipeline(predict(POLICY), SMOOTH[name]), PARAMS, batch(guidance=guidance)[0])


@settings(max_examples=10)
@given(name=st.sampled_from([*SMOOTH, *HELD]), cut=st.integers(1, 3), order=st.permutations(range(4)))
def test_sums_are_exact_under_any_split_of_whole_groups(name: str, cut: int, order: list[int]) -> None:
    (whole,) = batch()
    pairs = [torch.tensor([2 * i, 2 * i + 1]) for i in order]
    parts = [rows_of(whole, torch.cat(some)) for some in (pairs[:cut], pairs[cut:])]
    objective = pipeline(predict(POLICY), (SMOOTH | HELD)[name])
    laws.exact_under_split(objective, PARAMS, whole, parts, [rows_of(whole, rows) for rows in pairs])


@pytest.mark.parametrize("name", [*SMOOTH, *HELD])
def test_time_terms_are_one_mean(name: str) -> None:
    """Two levels a sample: the gradient is the mean of both levels' gradients, divided once."""
    objective = pipeline(predict(POLICY), (SMOOTH | HELD)[name])
    first, second = batch(terms=2)
    both, sums = accumulate(objective)(PARAMS, (first, second))
    single = [accumulate(objective)(PARAMS, (b,)) for b in (first, second)]
    assert float(sums.weight) == 2 * float(single[0][1].weight)
    for received, a, b in zip(*(tree.leaves(g) for g in (both, single[0][0], single[1][0])), strict=True):
        assert torch.allclose(received, (a + b) / 2, atol=1e-5 * float(received.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", [*SMOOTH, *HELD])
def test_objectives_are_pure(name: str) -> None:
    laws.pure(pipeline(predict(POLICY), (SMOOTH | HELD)[name]), PARAMS, batch()[0])
