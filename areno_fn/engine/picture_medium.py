"""Pictures: rows are pictures of a class, drawn by denoising; rewards are asked about arrays from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.execution import Acquisition
from areno_fn.contracts.flow import Conditions, FlowPrompts, Trajectory
from areno_fn.contracts.flow_batch import Clean
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising, FlowDPO, Phase
from areno_fn.engine.flow_medium import FlowMedium, apart, finite
from areno_fn.engine.medium import Encoded
from areno_fn.engine.text_medium import names_of
from areno_fn.steps.recipes.flow_drawing import Draw
from areno_fn.world import pictures
from areno_fn.world.data_row import Row
from areno_fn.world.pictures import PairRow, Picture, PictureRow


@attrs.frozen(kw_only=True)
class Pictures(FlowMedium):
    """The medium of a flow model whose latents are pictures, from -1 to 1 where those of the world are from 0 to 1.

    Attributes:
        drawing: draws for evaluations.
        shape: C, S, S of a picture.
        classes: labels are below it; `classes` itself stands for none, which guidance leads away from.
    """

    drawing: Draw
    shape: tuple[int, ...]
    classes: int

    def require_fit(self, spec: Phase, where: str) -> None:
        """Pictures are of the model's size, or `encode` refuses them."""

    def encode(self, spec: Phase, rows: Sequence[Row]) -> Encoded:
        """The pictures of a phase with their classes, or the classes alone."""
        if isinstance(spec.algorithm, FlowDPO):
            return Encoded(examples=pictures.encode_pairs(rows, self.shape, self.classes))
        found = pictures.encode(rows, self.shape, self.classes)
        if spec.algorithm.execution.acquisition is Acquisition.DATASET:
            return Encoded(examples=found)
        return Encoded(prompts=tuple(row.label for row in found))

    def encode_prompts(self, rows: Sequence[Row], spec: Denoising) -> tuple[int, ...]:
        """The classes of an evaluation."""
        del spec
        return tuple(row.label for row in pictures.encode(rows, self.shape, self.classes))

    def batch(self, examples: Sequence[PictureRow | PairRow], rows: Sequence[int], spec: Phase) -> Clean:
        """Pictures as latents; of a pair both, the preferred one first, named by twice the name of the pair."""
        del spec
        shown: list[Picture] = []
        labels: list[int] = []
        ids: list[int] = []
        for name, one in zip(names_of(rows, len(examples)), (examples[row] for row in rows), strict=True):
            pair = isinstance(one, PairRow)
            shown += [one.chosen, one.rejected] if isinstance(one, PairRow) else [one.picture]
            labels += [one.label, one.other] if isinstance(one, PairRow) else [one.label]
            ids += [2 * name, 2 * name + 1] if pair else [name]
        latents = 2 * torch.from_numpy(np.stack(shown)) - 1
        return Clean(latents=latents, prompts=self._prompts(labels, ids, torch.device("cpu")))

    def prompts(self, prompts: Sequence[int], rows: Sequence[int], device: torch.device) -> FlowPrompts:
        """The classes of some rows, and none beside them."""
        return self._prompts([prompts[row] for row in rows], names_of(rows, len(prompts)), device)

    def _prompts(self, labels: Sequence[int], ids: Sequence[int], device: torch.device) -> FlowPrompts:
        positive = torch.tensor(labels)
        none = torch.full_like(positive, self.classes)
        conditions = Conditions(positive=positive.to(device), negative=none.to(device))
        return FlowPrompts(conditions=conditions, ids=torch.tensor(ids).to(device))

    def draw(
        self, params: Any, prompts: Sequence[int], key: Key, spec: Denoising, *, device: torch.device, max_rows: int
    ) -> torch.Tensor:
        """One latent a prompt, by the ODE."""
        return self.drawing(params, self.prompts(prompts, range(len(prompts)), device), key, spec, max_rows)

    def shown(self, drawn: Trajectory | torch.Tensor) -> list[Picture]:
        """The picture of every latent, float32 [C, S, S]."""
        latents = finite(drawn)
        return list(((latents.float() + 1) / 2).clamp(0, 1).cpu().numpy())

    def described(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Picture]) -> Metrics:
        """How far the pictures of one class are from each other."""
        return apart([row["label"] for row in rows], samples)

    @property
    def tries(self) -> int:
        """A few rows, since a judge may be wrong about any one of them."""
        return 16

    def rehearsed(self, row: Mapping[str, Any]) -> tuple[Picture, Picture]:
        """An empty picture, and the row's own."""
        own = row["picture"] if "picture" in row else row["chosen"]
        return np.zeros(self.shape, np.float32), pictures.array(own)

    @property
    def tried(self) -> tuple[str, str]:
        """The words for these two."""
        return "an empty picture", f"the rows' own, on average of at most {self.tries}"
