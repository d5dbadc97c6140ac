"""Numbers that describe a judged rollout, by the names of the metric table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout
from areno_fn.steps.token.experience import drawn_places

_PEAKS = ("_max",)
_COUNTS = ("/tokens", "flow/steps")


def describe(batch: JudgedRollout, advantages: torch.Tensor) -> Metrics:
    """Rewards, advantages and lengths of a rollout.

    Args:
        batch: B judged sequences.
        advantages: float32, of completions [B], or of their tokens [B, T] where those that were drawn count.
    """
    rollout = batch.rollout
    advantages = advantages[drawn_places(rollout)] if advantages.ndim == 2 else advantages
    lengths = {
        "rollout/response_len_mean": rollout.lengths.double().mean(),
        "rollout/prompt_len_mean": rollout.prompts.lengths.double().mean(),
        "rollout/truncated_fraction": 1 - rollout.finished.double().mean(),
    }
    judged = describe_rewards(batch.rewards, rollout.groups, advantages)
    return judged | {name: float(value) for name, value in lengths.items()}


def describe_rewards(rewards: torch.Tensor, groups: torch.Tensor, advantages: torch.Tensor) -> Metrics:
    """Rewards and advantages of what was sampled, of whatever it is made.

    Args:
        rewards: [B].
        groups: int64 [B], rows with one number answer the same prompt.
        advantages: of any shape; all of them count.
    """
    rewards = rewards.double()
    low, high, several = _group_extremes(rewards, groups)
    values = {
        "rollout/reward_mean": rewards.mean(),
        "rollout/reward_std": rewards.std(correction=0),
        "rollout/reward_min": rewards.min(),
        "rollout/reward_max": rewards.max(),
        "rollout/advantage_mean": advantages.double().mean(),
        "rollout/advantage_std": advantages.double().std(correction=0),
        "rollout/zero_std_groups": (low == high)[several].double().sum() / max(1, int(several.sum())),
    }
    return {name: float(value) for name, value in values.items()}


def mean_metrics(reported: Sequence[Metrics]) -> Metrics:
    """One report for several updates: sums of counts, maxima of names that end in `_max`, means of all others.

    A name that one of them does not report is left out.
    """
    names = [name for name in reported[0] if all(name in metrics for metrics in reported)]
    return {name: _combine(name, [metrics[name] for metrics in reported]) for name in names}


def _combine(name: str, values: list[float]) -> float:
    if name.endswith(_PEAKS):
        return max(values)
    return sum(values) if name.endswith(_COUNTS) else sum(values) / len(values)


def _group_extremes(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The smallest and largest reward of every group, and whether it has several."""
    _, inverse, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    count = counts.shape[0]
    low = rewards.new_full((count,), torch.inf).scatter_reduce(0, inverse, rewards, "amin")
    high = rewards.new_full((count,), -torch.inf).scatter_reduce(0, inverse, rewards, "amax")
    return low, high, counts > 1
