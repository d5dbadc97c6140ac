"""Pictures of prompts: a pipeline's frozen parts say what prompts mean, and turn pictures into latents and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.execution import Acquisition
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.flow_adapter import FlowAdapter
from areno_fn.contracts.flow_batch import Clean, EachReward, JudgedTrajectory
from areno_fn.contracts.key import Key
from areno_fn.contracts.media import Request
from areno_fn.contracts.spec import Denoising, FlowDPO, Phase
from areno_fn.engine.conditions import ConditionCache
from areno_fn.engine.medium import Encoded
from areno_fn.engine.parts import FrozenParts
from areno_fn.engine.picture_medium import DIVERSITY
from areno_fn.engine.text_medium import names_of
from areno_fn.steps.recipes.flow_drawing import Draw
from areno_fn.world import pictures
from areno_fn.world.data_row import Row
from areno_fn.world.pictures import Picture, subjects
from areno_fn.world.prompted import PromptedRow, example_of, request_of, shot_of
from areno_fn.world.rewards import Reward

AT_ONCE = 8
"""Most pictures that an autoencoder is given at once."""


@attrs.frozen(kw_only=True)
class PromptedPictures:
    """The medium of a pipeline.

    Attributes:
        drawing: draws for evaluations.
        adapter: the pipeline as functions.
        parts: its frozen parts, none of which is loaded by a plan.
        conditions: what prompts mean.
        device: where frozen parts compute.
    """

    drawing: Draw
    adapter: FlowAdapter
    parts: FrozenParts
    conditions: ConditionCache
    device: torch.device

    def require_fit(self, spec: Phase, where: str) -> None:
        """Refuses a phase whose algorithm the contract does not admit."""

    def encode(self, spec: Phase, rows: Sequence[Row]) -> Encoded:
        """Requests, with the pictures that a data set shows; those are looked at, and read when their batch comes."""
        if spec.algorithm.execution.acquisition is not Acquisition.DATASET:
            return Encoded(prompts=self.encode_prompts(rows, None))
        keys = ("chosen", "rejected") if isinstance(spec.algorithm, FlowDPO) else ("image",)
        found = tuple(example_of(row, place, keys) for place, row in enumerate(rows))
        for example, row in zip(found, rows, strict=True):
            self.adapter.contract.admit(example.request, row.where, self.adapter.size)
            self._require_size(example)
        return Encoded(examples=found)

    def encode_prompts(self, rows: Sequence[Row], spec: Denoising | None) -> tuple[Request, ...]:
        """What rows ask for."""
        del spec
        found = tuple(request_of(row) for row in rows)
        for request, row in zip(found, rows, strict=True):
            self.adapter.contract.admit(request, row.where, self.adapter.size)
        return found

    def require_judged(
        self, rewards: Sequence[Reward], rows: Sequence[Row], prompts: Sequence[Request], spec: Any
    ) -> None:
        """Every reward of pictures takes every row."""

    def remarks(self, rows: Sequence[Mapping[str, Any]], *, trained: bool) -> list[str]:
        """Nothing."""
        del rows, trained
        return []

    def batch(self, examples: Sequence[PromptedRow], rows: Sequence[int], spec: Phase) -> Clean:
        """Pictures as latents, encoded anew every time; of a pair both, the preferred one first, named by twice its name."""
        del spec
        chosen = [examples[row] for row in rows]
        names = names_of(rows, len(examples))
        each = len(chosen[0].shots)
        ids = [each * name + place for name in names for place in range(each)]
        requests = [one.request for one in chosen for _ in one.shots]
        shown = torch.stack([shot.read() for one in chosen for shot in one.shots])
        return Clean(latents=self._latents(shown), prompts=self._prompts(requests, ids, self.device))

    def prompts(self, prompts: Sequence[Request], rows: Sequence[int], device: torch.device) -> FlowPrompts:
        """What is asked for in some rows, and what is not."""
        return self._prompts([prompts[row] for row in rows], names_of(rows, len(prompts)), device)

    def draw(self, params: Any, prompts: FlowPrompts, key: Key, spec: Denoising, *, max_rows: int) -> torch.Tensor:
        """One latent a prompt, by the ODE."""
        return self.drawing(params, prompts, key, spec, max_rows)

    def shown(self, drawn: Trajectory | torch.Tensor) -> list[Picture]:
        """The picture of every latent, float32 [3, H, W] from 0 to 1."""
        latents = drawn.final if isinstance(drawn, Trajectory) else drawn
        parts = self.parts.of(self.adapter.contract.codec)
        with torch.no_grad():
            found = [self.adapter.decode(parts, few)["image"].cpu() for few in latents.split(AT_ONCE)]
        return list(torch.cat(found).numpy())

    def tokens(self, drawn: Any) -> None:
        """There are none."""

    def judged(self, drawn: Trajectory, rewards: torch.Tensor, each: EachReward) -> JudgedTrajectory:
        """The trajectory with its rewards."""
        return JudgedTrajectory(rollout=drawn, rewards=rewards, each=each)

    def rates(self, drawn: Trajectory, seconds: float) -> Metrics:
        """Pictures drawn per second."""
        return {"flow/pictures_per_s": drawn.ids.shape[0] / max(seconds, 1e-9)}

    def described(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Picture]) -> Metrics:
        """How far the pictures of one prompt are from each other."""
        return {DIVERSITY: pictures.diversity(subjects(rows), samples)}

    def text(self, sample: Picture) -> str:
        """The picture in characters."""
        return pictures.text(sample)

    def rehearsed(self, row: Mapping[str, Any]) -> tuple[Picture, Picture]:
        """An empty picture, and the row's own, where it has one."""
        empty = np.zeros((3, self.adapter.size.height, self.adapter.size.width), np.float32)
        key = next((key for key in ("image", "chosen") if key in row), None)
        if key is None or not isinstance(row, Row):
            return empty, np.ones_like(empty)
        return empty, shot_of(row, row[key], key).read().numpy()

    @property
    def tried(self) -> tuple[str, str]:
        """The words for these two."""
        return "an empty picture", "the row's own, or a white one"

    def _prompts(self, requests: Sequence[Request], ids: Sequence[int], device: torch.device) -> FlowPrompts:
        negative = self.adapter.contract.classifier_free
        conditions = self.conditions.stacked(requests, device, negative=negative)
        return FlowPrompts(conditions=conditions, ids=torch.tensor(ids).to(device))

    def _latents(self, shown: torch.Tensor) -> torch.Tensor:
        parts = self.parts.of(self.adapter.contract.codec)
        with torch.no_grad():
            found = [self.adapter.encode_output(parts, {"image": few}) for few in shown.split(AT_ONCE)]
        return torch.cat(found).float()

    def _require_size(self, example: PromptedRow) -> None:
        size = self.adapter.size
        for shot in example.shots:
            if shot.size != (size.height, size.width):
                raise DataError(
                    f"{shot.where}: the picture is {shot.size[0]} x {shot.size[1]}, but the model makes {size}, "
                    f"geometry: resize it, or set model.pipeline"
                )
