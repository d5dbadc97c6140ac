"""Pictures of prompts: a pipeline's frozen parts say what prompts mean, and turn pictures into latents and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.errors import DataError, DivergenceError
from areno_fn.contracts.execution import Acquisition
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.flow_adapter import FlowAdapter
from areno_fn.contracts.flow_batch import Clean
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.key import Key
from areno_fn.contracts.media import MediaType, Request, Stored
from areno_fn.contracts.pipeline_io import Output
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Denoising, FlowDPO, Phase
from areno_fn.engine.conditions import ConditionCache
from areno_fn.engine.flow_medium import FlowMedium, apart, finite
from areno_fn.engine.medium import Encoded
from areno_fn.engine.parts import FrozenParts
from areno_fn.engine.prompt_lengths import cut_prompts
from areno_fn.engine.text_medium import names_of
from areno_fn.steps.recipes.flow_drawing import Draw
from areno_fn.world.data_row import Row
from areno_fn.world.pictures import Picture, subjects
from areno_fn.world.prompted import PromptedRow, Shot, demonstration, preference, request_of, shot_of

AT_ONCE: Mapping[MediaType, int] = {"image": 8, "video": 1}
"""Most that an autoencoder is given at once."""


_LESS = 0.05
"""Seconds that sound may lack of its video, as what a model makes does; it may be a frame longer."""


@attrs.frozen(kw_only=True)
class PromptedPictures(FlowMedium):
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
        read = preference if isinstance(spec.algorithm, FlowDPO) else demonstration
        found = tuple(read(row, place, self._types) for place, row in enumerate(rows))
        self._admit([example.request for example in found], rows)
        for example in found:
            self._require_size(example)
        return Encoded(examples=found)

    def encode_prompts(self, rows: Sequence[Row], spec: Denoising | None) -> tuple[Request, ...]:
        """What rows ask for."""
        del spec
        found = tuple(request_of(row) for row in rows)
        self._admit(found, rows)
        return found

    def _admit(self, requests: Sequence[Request], rows: Sequence[Row]) -> None:
        for request, row in zip(requests, rows, strict=True):
            self.adapter.contract.admit(request, row.where, self.adapter.size)
        if rows:
            self.adapter.contract.admit_together(requests, rows[-1].where)

    def cut(self, rows: Sequence[Row]) -> list[str]:
        """The data sets whose prompts are longer than what the text encoders read."""
        names = self.adapter.contract.preparer
        tokenizers = [part.name for part in self.parts.components.located(names) if part.kind == "tokenizer"]
        return cut_prompts(self.adapter, self.parts.of(tokenizers), rows)

    def batch(self, examples: Sequence[PromptedRow], rows: Sequence[int], spec: Phase) -> Clean:
        """Pictures as latents, encoded anew every time; of a pair both, the preferred one first, named by twice its name."""
        del spec
        chosen = [examples[row] for row in rows]
        names = names_of(rows, len(examples))
        each = len(chosen[0].shown)
        ids = [each * name + place for name in names for place in range(each)]
        requests = [one.request for one in chosen for _ in one.shown]
        latents = self._latents([shots for one in chosen for shots in one.shown])
        return Clean(latents=latents, prompts=self._prompts(requests, ids, self.device))

    def prompts(self, prompts: Sequence[Request], rows: Sequence[int], device: torch.device) -> FlowPrompts:
        """What is asked for in some rows, and what is not, and the latents that sampling begins near, where it does."""
        chosen = [prompts[row] for row in rows]
        asked = self._prompts(chosen, names_of(rows, len(prompts)), device)
        if self.adapter.contract.initial == "noise":
            return asked
        return replace(asked, begin=self._begun(chosen).to(device))

    def draw(
        self, params: Any, prompts: Sequence[Request], key: Key, spec: Denoising, *, device: torch.device, max_rows: int
    ) -> torch.Tensor:
        """One latent a prompt, by the ODE; no more conditions are on the device than are drawn for at once."""
        places = range(len(prompts))
        few = (self.prompts(prompts, places[start : start + max_rows], device) for start in places[::max_rows])
        return torch.cat([self.drawing(params, asked, key, spec, max_rows) for asked in few])

    def shown(self, drawn: Trajectory | torch.Tensor) -> list[Picture]:
        """The picture of every latent, float32 [3, H, W], or the video [T, 3, H, W], from 0 to 1."""
        latents = finite(drawn)
        parts = self.parts.of(self.adapter.contract.codec)
        with torch.no_grad():
            found = [self.adapter.decode(parts, few)[self._seen].cpu() for few in latents.split(AT_ONCE[self._seen])]
        made = torch.cat(found)
        if not bool(made.isfinite().all()):
            codec = " and ".join(self.adapter.contract.codec)
            raise DivergenceError(
                f"the {codec} made of finite latents what is not; load it in float32, with model.pipeline.dtype, or see whether "
                f"its weights are finite"
            )
        return list(made.numpy())

    def described(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Picture]) -> Metrics:
        """How far the pictures of one prompt are from each other."""
        return apart(subjects(rows), samples)

    @property
    def tries(self) -> int:
        """One row of a data set, whose media are large."""
        return 1

    def rehearsed(self, row: Mapping[str, Any]) -> tuple[Picture, Picture]:
        """An empty picture, and the row's own, where it has one."""
        size = self.adapter.size
        frames = (size.frames,) if self._seen == "video" else ()
        empty = np.zeros((*frames, 3, size.height, size.width), np.float32)
        if self._seen not in row or not isinstance(row, Row):
            return empty, np.ones_like(empty)
        return empty, shot_of(row, row[self._seen], self._seen).read().numpy()

    @property
    def tried(self) -> tuple[str, str]:
        """The words for these two."""
        return f"an empty {'video' if self._seen == 'video' else 'picture'}", "the first row's own, or a white one"

    def _prompts(self, requests: Sequence[Request], ids: Sequence[int], device: torch.device) -> FlowPrompts:
        negative = self.adapter.contract.classifier_free
        conditions = self.conditions.stacked(requests, device, negative=negative)
        return FlowPrompts(conditions=conditions, ids=torch.tensor(ids).to(device))

    @property
    def _types(self) -> tuple[MediaType, ...]:
        return tuple(output.type for output in self.adapter.contract.outputs)

    @property
    def _seen(self) -> MediaType:
        """What rewards and people look at; sound beside a video is not shown."""
        return next(type for type in self._types if type != "audio")

    def _begun(self, requests: Sequence[Request]) -> torch.Tensor:
        """The latents of the given media that sampling begins near; they are encoded anew every time."""
        return self._latents([{one.type: one.source for one in request.media} for request in requests])

    def _latents(self, shown: Sequence[Mapping[MediaType, torch.Tensor | Stored]]) -> torch.Tensor:
        parts, most = self.parts.of(self.adapter.contract.codec), AT_ONCE[self._seen]
        found = []
        for start in range(0, len(shown), most):
            few = shown[start : start + most]
            made = {type: torch.stack([_read(shots[type]) for shots in few]) for type in self._types}
            with torch.no_grad():
                found.append(self.adapter.encode_output(parts, made))
        latents = torch.cat(found).float()
        if tuple(latents.shape[1:]) != tuple(self.adapter.latent_shape) or not bool(latents.isfinite().all()):
            codec, wanted = " and ".join(self.adapter.contract.codec), ["B", *self.adapter.latent_shape]
            raise DataError(
                f"the {codec} made latents {list(latents.shape)} of what is given, which must be finite numbers {wanted}; "
                f"load it in float32, with model.pipeline.dtype"
            )
        return latents

    def _require_size(self, example: PromptedRow) -> None:
        size = self.adapter.size
        for shots in example.shown:
            shot = shots[self._seen]
            frames = shot.shape[0] if shot.type == "video" else 1
            found = Size(height=shot.shape[-2], width=shot.shape[-1], frames=frames)
            if found != size:
                raise DataError(
                    f"{shot.where}: the {shot.type} is {found}, but the model makes {size}, geometry: resize it, or set "
                    f"the size under model.pipeline"
                )
            for output in self.adapter.contract.outputs:
                if output.type == "audio":
                    self._require_sound(shots["audio"], output)

    def _require_sound(self, shot: Shot, output: Output) -> None:
        """Refuses sound of other channels, or of another length than the video that it belongs to."""
        (video,) = (one for one in self.adapter.contract.outputs if one.type == "video")
        channels, lasts, wanted = shot.shape[0], shot.shape[1] / output.rate, self.adapter.size.frames / video.rate
        if channels != output.channels or not wanted - _LESS <= lasts <= wanted + 1 / video.rate:
            raise DataError(
                f"{shot.where}: the sound is {list(shot.shape)}, {lasts:.3f} s at {output.rate} samples a second, but the model "
                f"makes {output.channels} channels of {wanted:.3f} s; cut or lengthen it"
            )


def _read(given: torch.Tensor | Stored) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else given.read()
