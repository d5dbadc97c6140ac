"""What the media of flow models have in common: no tokens, and rewards that take every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.errors import DivergenceError
from areno_fn.contracts.flow import Trajectory
from areno_fn.contracts.flow_batch import EachReward, JudgedTrajectory
from areno_fn.world import pictures
from areno_fn.world.data_row import Row
from areno_fn.world.pictures import Picture
from areno_fn.world.rewards import Reward

DIVERSITY = "diversity"
"""What the mean distance of pictures of one class or prompt is called beside the rewards of an evaluation."""


def finite(drawn: Trajectory | torch.Tensor) -> torch.Tensor:
    """The latents that were drawn, which rewards are not asked about where they are no numbers.

    Raises:
        DivergenceError: some are not finite.
    """
    latents = drawn.final if isinstance(drawn, Trajectory) else drawn
    lost = (~latents.isfinite()).flatten(1).any(1)
    if bool(lost.any()):
        raise DivergenceError(
            f"{int(lost.sum())} of {len(lost)} samples that the model drew are not finite numbers; see whether its weights are, "
            f"or lower the learning rate, or the shift or level of the denoising"
        )
    return latents


def apart(labels: Sequence[int], samples: Sequence[Picture]) -> Metrics:
    """How far the pictures of one class are from each other, where some class has several."""
    found = pictures.diversity(labels, samples)
    return {} if found is None else {DIVERSITY: found}


class FlowMedium:
    """The part of a `Medium` that is the same whatever the pictures are drawn for."""

    __slots__ = ()

    def require_judged(self, rewards: Sequence[Reward], rows: Sequence[Row], prompts: Sequence[Any], spec: Any) -> None:
        """Every reward of pictures takes every row."""

    def remarks(self, rows: Sequence[Mapping[str, Any]], *, trained: bool) -> list[str]:
        """Nothing."""
        del rows, trained
        return []

    def cut(self, rows: Sequence[Row]) -> list[str]:
        """Nothing: a class is no text."""
        del rows
        return []

    def tokens(self, drawn: Any) -> None:
        """There are none."""

    def judged(self, drawn: Trajectory, rewards: torch.Tensor, each: EachReward) -> JudgedTrajectory:
        """The trajectory with its rewards."""
        return JudgedTrajectory(rollout=drawn, rewards=rewards, each=each)

    def rates(self, drawn: Trajectory, seconds: float) -> Metrics:
        """Pictures drawn per second."""
        return {"flow/pictures_per_s": drawn.ids.shape[0] / max(seconds, 1e-9)}

    def text(self, sample: Picture) -> str:
        """The picture in a few words; it is in a sheet of the evaluation."""
        return pictures.text(sample)
