"""Noise levels to train at: where they lie, how they are spread, and that they belong to (key, id)."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from flow_models import Field, numbers, parameters, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.key import Key
from areno_fn.steps.flow.path import noised, predict, remember, rows_of
from areno_fn.steps.flow.schedule import flow_match, shifted, unshifted
from areno_fn.steps.flow.times import Grid, Times, grid_steps, sampled_steps, sampled_times, share

kinds = st.sampled_from(["uniform", "logit_normal"])
shifts = st.floats(0.1, 10) | st.sampled_from([1.0, 3.0])
part = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
ends = st.tuples(part, part).filter(lambda e: e[0] + 1e-3 < e[1])


@given(
    kind=kinds, shift=shifts, ends=ends, mean=st.floats(-2, 2), std=st.floats(0.2, 2), spread=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_L16_levels_lie_in_the_range_after_the_shift(
    kind: str, shift: float, ends: tuple[float, float], mean: float, std: float, spread: bool, seed: int
) -> None:
    times = Times(kind=kind, shift=shift, low=ends[0], high=ends[1], mean=mean, std=std, spread=spread)
    levels = sampled_times(times, Key.of(seed), torch.arange(-20, 20))
    slack = 1e-7
    assert levels.dtype == torch.float32 and levels.min() > 0 and levels.max() < 1
    assert levels.min() >= ends[0] - slack and levels.max() <= ends[1] + slack


@given(seed=st.integers(0, 1000), spread=st.booleans(), rows=st.permutations(range(6)))
def test_a_sample_keeps_its_level_in_any_batch(seed: int, spread: bool, rows: list[int]) -> None:
    times, ids = Times(kind="logit_normal", spread=spread), torch.tensor([3, 1, 2**62, -7, 0, 12])
    whole = sampled_times(times, Key.of(seed), ids)
    assert torch.equal(sampled_times(times, Key.of(seed), ids[rows]), whole[rows])
    assert torch.equal(sampled_times(times, Key.of(seed), ids[2:3]), whole[2:3])


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_and_logit_normal_have_their_quantiles(shift: float, spread: bool) -> None:
    """The median of a shifted uniform level is s / (1 + s); that of a logit-normal one shift(sigmoid(mean))."""
    ids, key = torch.arange(20_000), Key.of(1)
    flat = sampled_times(Times(shift=shift, spread=spread), key, ids).double()
    bell = sampled_times(Times(kind="logit_normal", mean=0.5, std=1.2, shift=shift, spread=spread), key, ids).double()
    for probability in (0.1, 0.25, 0.5, 0.9):
        z = NormalDist().inv_cdf(probability)
        expected = shifted(1 / (1 + math.exp(-(0.5 + 1.2 * z))), shift)
        assert flat.quantile(probability).item() == pytest.approx(shifted(probability, shift), abs=0.012)
        assert bell.quantile(probability).item() == pytest.approx(expected, abs=0.012)


def test_a_range_conditions_the_shifted_distribution() -> None:
    """Uniform, shifted by 3, between .5 and .9: before the shift it lies between .25 and .75, so the median is shift(.5) = .75."""
    ids = torch.arange(4000)
    levels = sampled_times(Times(shift=3.0, low=0.5, high=0.9), Key.of(2), ids).double()
    assert levels.median().item() == pytest.approx(0.75, abs=0.01)
    assert levels.quantile(0.25).item() == pytest.approx(shifted(0.375, 3.0), abs=0.01)
    bell = sampled_times(Times(kind="logit_normal", shift=3.0, low=0.75, high=1.0), Key.of(2), ids).double()
    right_half = 1 / (1 + math.exp(-NormalDist().inv_cdf(0.75)))
    assert bell.median().item() == pytest.approx(shifted(right_half, 3.0), abs=0.01)


def test_a_shift_above_1_means_more_noise_and_is_applied_once() -> None:
    ids = torch.arange(1000)
    plain, moved = (sampled_times(Times(shift=s), Key.of(4), ids) for s in (1.0, 3.0))
    assert bool((moved > plain).all())
    assert torch.allclose(moved, 3 * plain / (1 + 2 * plain), atol=1e-6)


def test_spread_levels_cover_the_range_evenly() -> None:
    """Of any 64 neighbours, every 16th of the range has 3 to 5, where independent draws leave some empty."""
    for first in (0, 1000, 12345):
        levels = sampled_times(Times(), Key.of(first), torch.arange(first, first + 64))
        counts = torch.histc(levels, 16, 0.0, 1.0)
        assert counts.min() >= 3 and counts.max() <= 5


@given(s=shifts, level=st.floats(0, 1))
def test_unshifted_is_the_inverse_of_shifted(s: float, level: float) -> None:
    assert unshifted(shifted(level, s), s) == pytest.approx(level, abs=1e-9)
    assert shifted(0.0, s) == 0.0 and shifted(1.0, s) == pytest.approx(1.0, rel=1e-15)


def test_a_part_of_the_denoising_axis() -> None:
    """The first 60 % of denoising are levels .4 to 1."""
    assert share(0.0, 0.6) == (0.4, 1.0) and share(0.2, 0.9) == (pytest.approx(0.1), 0.8)


@pytest.mark.parametrize("spread", [True, False])
def test_L16_every_step_is_drawn_with_the_same_probability(spread: bool) -> None:
    steps = torch.tensor([0, 2, 3, 7])
    drawn = sampled_steps(Key.of(0), torch.arange(8000), steps, spread=spread)
    counts = torch.stack([(drawn == s).sum() for s in steps])
    assert int(counts.sum()) == 8000 and (counts - 2000).abs().max() < 200


def test_L16_levels_of_a_grid_are_those_that_the_sampler_asks_at() -> None:
    schedule = flow_match(10, shift=3.0)
    part = grid_steps(10, 0.0, 0.6)
    assert part == (0, 1, 2, 3, 4, 5) and grid_steps(28, 0.1, 0.99) == tuple(range(2, 27))
    levels = sampled_times(Grid(schedule=schedule, steps=part), Key.of(0), torch.arange(6000))
    counts = torch.stack([(levels == schedule.sigmas[i]).sum() for i in part])
    assert int(counts.sum()) == 6000 and (counts - 1000).abs().max() < 120
    last = sampled_times(Grid(schedule=schedule, steps=(-1,)), Key.of(0), torch.arange(3))
    assert last.tolist() == [float(schedule.sigmas[9])] * 3
    given = prompts(4)
    (batch,) = noised(CLEAN, given.conditions, given.ids, Key.of(0), Grid(schedule=schedule))
    assert set(batch.timestep.tolist()) <= set(schedule.timesteps.tolist())
    for wrong in (lambda: grid_steps(10, 0.5, 0.5), lambda: grid_steps(4, 0.0, 0.1), lambda: grid_steps(4, -0.1, 1.0)):
        with pytest.raises(SpecError, match="holds none; widen it within 0 to 1"):
            wrong()
    with pytest.raises(SpecError, match="needs at least one step"):
        Grid(schedule=schedule, steps=())
    with pytest.raises(SpecError, match="step 10 does not exist"):
        Grid(schedule=schedule, steps=(10,))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "cosine"}, "times 'cosine' do not exist; choose one of uniform, logit_normal"),
        ({"low": 0.5, "high": 0.5}, "0 <= low < high <= 1"),
        ({"std": 0.0}, "std > 0"),
        ({"shift": -1.0}, "shift > 0"),
    ],
)
def test_times_that_are_none_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Times(**fields)
    with pytest.raises(SpecError, match="at least one candidate"):
        sampled_steps(Key.of(0), torch.arange(2), torch.tensor([], dtype=torch.int64))


# ------------------------------------------------------------------------------------------ the forward process

POLICY, PARAMS = Field(), parameters()
CLEAN, GIVEN = numbers("clean", 4, 2, 3), prompts(4)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_a_noised_sample_is_the_straight_path(seed: int) -> None:
    first, second = noised(CLEAN, GIVEN.conditions, GIVEN.ids, Key.of(seed), Times(), terms=2)
    for batch in (first, second):
        sigma = batch.sigma[:, None, None]
        noise = batch.target + CLEAN
        assert torch.allclose(batch.state, (1 - sigma) * CLEAN + sigma * noise, atol=1e-6)
        assert torch.equal(batch.timestep, batch.sigma * 1000)
    assert not (set(first.sigma.tolist()) & set(second.sigma.tolist()))
    assert not torch.equal(first.target, second.target)


def test_rows_that_share_a_number_share_level_and_noise() -> None:
    shared = torch.tensor([7, 7, 9, 9])
    (batch,) = noised(CLEAN, GIVEN.conditions, GIVEN.ids, Key.of(0), Times(), shared=shared)
    noise = batch.target + CLEAN
    assert batch.sigma[0] == batch.sigma[1] != batch.sigma[2] == batch.sigma[3]
    assert torch.allclose(noise[0], noise[1], atol=1e-6) and not torch.allclose(noise[1], noise[2], atol=0.1)


def test_L10_all_models_are_asked_about_the_same_samples() -> None:
    (batch,) = noised(CLEAN, GIVEN.conditions, GIVEN.ids, Key.of(0), Times())
    batch = remember(POLICY, batch, old=PARAMS, reference=parameters("reference"))
    now = predict(POLICY)(PARAMS, batch)
    assert torch.equal(now.velocity, batch.old) and not torch.equal(now.velocity, batch.reference)
    part = rows_of(batch, torch.tensor([2, 0]))
    assert torch.equal(part.old, batch.old[[2, 0]]) and part.average is None


def test_masked_elements_are_not_noised() -> None:
    mask = torch.ones(4, 2, 3, dtype=torch.bool)
    mask[:, 1, 2] = False
    (batch,) = noised(CLEAN, GIVEN.conditions, GIVEN.ids, Key.of(0), Times(), mask=mask)
    assert torch.allclose(batch.state[:, 1, 2], CLEAN[:, 1, 2]) and batch.target[:, 1, 2].abs().max() == 0.0


def test_levels_of_a_schedule() -> None:
    assert flow_match(4).sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert flow_match(4, shift=3.0).sigmas.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])
