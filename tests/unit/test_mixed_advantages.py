"""Advantages of several rewards, and decays of copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flow_models import numbers

from areno_fn.contracts.errors import RecordError, RewardError, SpecError
from areno_fn.steps.flow.decay import ramped_decay
from areno_fn.steps.mixed_advantages import mixed_advantages

GROUPS = torch.tensor([5, 2, 5, 2, 9, 9, 9, 5])
REWARDS = numbers("rewards", 8, 3, dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)


def plain(rewards: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> np.ndarray:
    total = np.zeros(len(rewards))
    for g in set(groups.tolist()):
        rows = groups == g
        for k, w in enumerate(weights):
            r = rewards[rows, k]
            total[rows] += w * (r - r.mean()) / max(r.std(), 1e-6)
    return (total - total.mean()) / max(total.std(), 1e-6)


def test_the_formula() -> None:
    expected = plain(REWARDS.numpy(), WEIGHTS.numpy(), GROUPS.numpy())
    assert torch.allclose(mixed_advantages(REWARDS, WEIGHTS, GROUPS), torch.from_numpy(expected), atol=1e-12)


def test_by_hand() -> None:
    """Two groups of two, two rewards: (+-1, +-1), (+-1, 0 0): s = 2, -2, 1, -1, std sqrt(2.5)."""
    rewards = torch.tensor([[3.0, 10.0], [1.0, 8.0], [0.5, 7.0], [0.1, 7.0]], dtype=torch.float64)
    found = mixed_advantages(rewards, torch.ones(2), torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == pytest.approx([x / 2.5**0.5 for x in (2, -2, 1, -1)], rel=1e-12)


def test_L18_scale_shift_and_order_of_a_reward_change_nothing() -> None:
    found = mixed_advantages(REWARDS, WEIGHTS, GROUPS)
    moved = REWARDS.clone()
    moved[:, 1] = 1000 * moved[:, 1] - 7
    assert torch.allclose(mixed_advantages(moved, WEIGHTS, GROUPS), found, atol=1e-9)
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    assert torch.allclose(mixed_advantages(REWARDS[order], WEIGHTS, GROUPS[order]), found[order], atol=1e-12)


def test_L18_equal_rewards_are_exactly_0() -> None:
    assert mixed_advantages(torch.full((8, 3), 0.1), WEIGHTS, GROUPS).tolist() == [0.0] * 8
    assert mixed_advantages(torch.full((8, 3), 0.1), WEIGHTS, GROUPS).dtype == torch.float32


def test_a_row_takes_no_part_in_a_reward_that_does_not_apply() -> None:
    applies = torch.ones(8, 3, dtype=torch.bool)
    applies[4:7, 1] = False
    applies[0, 0] = False
    spoiled = torch.where(applies, REWARDS, torch.nan)
    found = mixed_advantages(spoiled, WEIGHTS, GROUPS, applies=applies)
    total = np.zeros(8)
    for k in range(3):
        for g in (2, 5, 9):
            rows = np.flatnonzero((g == GROUPS).numpy() & applies[:, k].numpy())
            if len(rows):
                r = REWARDS[rows, k].numpy()
                total[rows] += float(WEIGHTS[k]) * (r - r.mean()) / max(r.std(), 1e-6)
    expected = (total - total.mean()) / total.std()
    assert torch.allclose(found, torch.from_numpy(expected), atol=1e-12)
    alone = mixed_advantages(REWARDS, WEIGHTS, torch.arange(8))
    assert alone.tolist() == [0.0] * 8


def test_mistakes_are_refused() -> None:
    with pytest.raises(RecordError, match=r"takes rewards \[B, K\], weights \[K\] and applies \[B, K\]"):
        mixed_advantages(REWARDS, WEIGHTS[:2], GROUPS)
    with pytest.raises(RewardError, match="is nan"):
        mixed_advantages(torch.where(REWARDS[0, 0] == REWARDS, torch.nan, REWARDS), WEIGHTS, GROUPS)


def test_decays_by_hand() -> None:
    def nft(step: int) -> float:
        return ramped_decay(step, rate=0.0075, cap=0.999, flat=75)

    assert [nft(s) for s in (0, 74, 75, 76, 175, 1000)] == pytest.approx([0, 0, 0, 0.0075, 0.75, 0.999])
    assert ramped_decay(20, rate=0.005, cap=0.999, start=0.25) == pytest.approx(0.35)
    assert ramped_decay(5000, rate=0.001, cap=0.3) == 0.3 and ramped_decay(0, rate=0.001, cap=0.3) == 0.0
    for wrong in ({"step": -1}, {"cap": 1.5}, {"start": 0.9}, {"rate": -0.1}):
        with pytest.raises(SpecError, match="a ramped decay needs"):
            ramped_decay(**({"step": 0, "rate": 0.1, "cap": 0.5} | wrong))  # type: ignore[arg-type]
