"""Sampling a part of the prompts at a time, which bounds memory and changes no draw: noise is a function of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.flow import FlowPrompts, Schedule, Trajectory
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.sample import check_prompts

OF_ROWS = ("conditions", "groups", "ids", "final", "states", "logp", "mask")
"""The fields of a trajectory that hold something of every row."""


def limited(rollout: Callable[..., Trajectory], most: int) -> Callable[..., Trajectory]:
    """The same rollout with at most so many rows at once, but all samples of a prompt.

    Args:
        rollout: what `flow_sampler` returned.
        most: rows; 0 for any number.
    """
    if not most:
        return rollout

    def drawn(
        params: Any,
        prompts: FlowPrompts,
        key: Key,
        schedule: Schedule,
        levels: torch.Tensor,
        *,
        samples: int = 1,
        **options: Any,
    ) -> Trajectory:
        check_prompts(prompts, samples)
        each = max(most // samples, 1)
        starts = range(0, prompts.ids.shape[0], each)
        some = [tree.map(lambda x, start=start: x[start : start + each], prompts) for start in starts]
        return joined([rollout(params, few, key, schedule, levels, samples=samples, **options) for few in some])

    return drawn


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Trajectories of one schedule and process as one, row after row."""
    if len(parts) == 1:
        return parts[0]
    given = [name for name in OF_ROWS if getattr(parts[0], name) is not None]
    rows = {
        name: tree.map(lambda *leaves: torch.cat(leaves), *(getattr(part, name) for part in parts)) for name in given
    }
    return replace(parts[0], **rows)
