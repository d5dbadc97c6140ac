"""Advantages of several rewards at once: each compared within its group first, then added (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import shown
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.reduce import divide

SMALLEST_STD = 1e-6


def mixed_advantages(
    rewards: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor, *, applies: torch.Tensor | None = None
) -> torch.Tensor:
    r"""How much better a row is than its group in every reward, added with weights and scaled over the batch.

        s = sum over k of w_k (r_k - mean of the group) / std of the group,    A = (s - mean) / std

    Means and deviations are those of the population, deviations at least 1e-6. A reward that is shifted or scaled as a
    whole changes nothing, so no reward outweighs another by its scale alone; `group_advantages` of a weighted sum is the
    other choice. A reward in which a group is equal adds exactly 0 to its rows. Where a reward does not apply to a row
    the row takes no part in it: neither in the means of the others nor with a share of its own.

    Args:
        rewards: [B, K], finite where they apply.
        weights: [K].
        groups: int64 [B].
        applies: bool [B, K]; everywhere when omitted.

    Returns:
        float32 [B] (float64 for float64 rewards).

    Raises:
        RecordError: shapes do not fit.
        RewardError: a reward that applies is not finite; names the row.
    """
    if (
        rewards.ndim != 2
        or weights.shape != rewards.shape[1:]
        or (applies is not None and applies.shape != rewards.shape)
    ):
        raise RecordError(
            f"mixed_advantages takes rewards [B, K], weights [K] and applies [B, K], received {shown(rewards)}, "
            f"{shown(weights)} and {'None' if applies is None else shown(applies)}"
        )
    total = torch.zeros(rewards.shape[0], dtype=torch.float64, device=rewards.device)
    for k in range(rewards.shape[1]):
        rows = torch.ones_like(groups, dtype=torch.bool) if applies is None else applies[:, k]
        share = _within_groups(rewards[rows, k].double(), groups[rows])
        total[rows] += weights[k].double() * share
    deviation = total - total.mean()
    spread = deviation.square().mean().sqrt().clamp(min=SMALLEST_STD)
    return (deviation / spread).to(torch.promote_types(rewards.dtype, torch.float32))


def _within_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Deviations from the group's mean over the group's standard deviation, float64."""
    if not rewards.numel():
        return rewards
    _, member, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    # a row alone in its group deviates by 0 and needs no warning: in another reward it may have company
    several = (counts > 1)[member]
    deviation = torch.zeros_like(rewards)
    deviation[several] = group_advantages(rewards[several], groups[several], scale="none")
    square = rewards.new_zeros(len(counts)).index_add(0, member, deviation.square())
    spread = (square / counts).sqrt()[member]
    return divide(deviation, torch.where(spread == 0, 1.0, spread.clamp(min=SMALLEST_STD)))
