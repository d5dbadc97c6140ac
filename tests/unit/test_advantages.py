"""Group advantages against hand-worked numbers."""

from __future__ import annotations

import math
import statistics
import warnings

import pytest
import torch

from areno_fn.contracts.errors import RecordError, RewardError, SpecError
from areno_fn.steps.advantages import group_advantages


def of(rewards: list[float], groups: list[int] | None = None, **options: object) -> list[float]:
    numbers = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.tensor(groups if groups is not None else [0] * len(rewards))
    return group_advantages(numbers, ids, **options).tolist()  # type: ignore[arg-type]


def test_values_of_the_table() -> None:
    assert of([1, 2, 3]) == pytest.approx([-1.2247448, 0, 1.2247448], abs=1e-7)
    assert of([0, 1]) == pytest.approx([-1, 1], abs=5e-8)


def test_L9_population_deviation() -> None:
    """The deviation divides by n: [-.577 x 3, 1.732]; dividing by n - 1 would give [-.5 x 3, 1.5]."""
    assert of([0, 0, 0, 1]) == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)], abs=1e-7)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, -7.7, 1e30, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_L9_equal_rewards_give_exactly_zero(scale: str, value: float, dtype: torch.dtype) -> None:
    rewards, groups = torch.full((7,), value, dtype=dtype), torch.tensor([3, 3, 3, 5, 5, 5, 5])
    assert group_advantages(rewards, groups, scale=scale).tolist() == [0.0] * 7


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_L9_a_group_of_one_gives_zero_and_a_warning(scale: str) -> None:
    with pytest.warns(UserWarning, match="1 of 2 groups have one sample; its advantage is 0"):
        found = of([5.0, 1.0, 3.0], [9, 4, 4], scale=scale)
    assert found[0] == 0.0 and all(map(math.isfinite, found))
    with pytest.warns(UserWarning, match="1 of 1 groups"):
        assert of([5.0], [9], scale=scale) == [0.0]


def test_L10_group_and_batch_scales() -> None:
    rewards, groups = [0, 1, 0, 10], [0, 0, 1, 1]
    assert of(rewards, groups, scale="group") == pytest.approx([-1, 1, -1, 1], abs=5e-8)
    std = statistics.pstdev(rewards)
    assert of(rewards, groups, scale="batch") == pytest.approx([-0.5 / std, 0.5 / std, -5 / std, 5 / std])
    assert of(rewards, groups, scale="none") == [-0.5, 0.5, -5, 5]


def test_epsilon_is_added_outside_of_the_root() -> None:
    assert of([0, 2e-8]) == pytest.approx([-0.5, 0.5])
    assert of([0, 2], eps=1.0) == pytest.approx([-0.5, 0.5])


def test_groups_in_any_order_and_with_any_numbers() -> None:
    found = of([0, 0, 1, 10, 1, 2], [-4, 10**15, -4, 10**15, 7, 7], scale="none")
    assert found == [-0.5, -5, 0.5, 5, -0.5, 0.5]


def test_the_result_is_float32_for_float32_and_integer_rewards() -> None:
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        assert group_advantages(torch.tensor([0, 1], dtype=dtype), torch.tensor([0, 0])).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_row(bad: float) -> None:
    with pytest.raises(RewardError, match=r"the reward of row 2 is (nan|-?inf) \(1 such rows\)"):
        of([0, 1, bad, 1])


def test_misuse_is_refused() -> None:
    with pytest.raises(SpecError, match="advantage scale 'global' does not exist; choose one of group, batch, none"):
        of([0, 1], scale="global")
    with pytest.raises(RecordError, match="takes rewards"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RecordError, match="integer groups"):
        group_advantages(torch.zeros(2), torch.zeros(2))


def test_no_warning_otherwise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of([0, 1, 0, 1], [0, 0, 1, 1])


def test_leave_one_out_compares_with_the_others_of_a_group() -> None:
    """Rewards 1, 2, 6 of one group: the others' means are 4, 3.5 and 1.5."""
    rewards, groups = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0]), torch.tensor([4, 4, 4, 2, 2])
    found = group_advantages(rewards, groups, baseline="leave_one_out", scale="none")
    assert found.tolist() == pytest.approx([-3.0, -1.5, 4.5, 0.0, 0.0], abs=1e-6)
    with pytest.warns(UserWarning, match="one sample"):
        alone = group_advantages(torch.tensor([3.0]), torch.tensor([0]), baseline="leave_one_out", scale="none")
    assert alone.tolist() == [0.0]


def test_a_baseline_of_the_batch_whitens_all_rewards() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 3.0]), torch.tensor([0, 1, 2, 3])
    found = group_advantages(rewards, groups, baseline="batch", scale="batch")
    spread = 1.5**0.5  # deviations -1, 0, -1, 2
    assert found.tolist() == pytest.approx([-1 / spread, 0.0, -1 / spread, 2 / spread], abs=1e-6)
    with pytest.raises(SpecError, match="baseline 'mean' does not exist; choose one of group, leave_one_out, batch"):
        group_advantages(rewards, groups, baseline="mean")
