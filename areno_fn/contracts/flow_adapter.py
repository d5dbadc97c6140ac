"""`FlowAdapter`: what a family of pipelines answers beside its velocity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch

from areno_fn.contracts.flow import Conditions, Solver
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.media import MediaType, Request
from areno_fn.contracts.pipeline_io import PipelineIOContract

Parts = Mapping[str, Any]
"""Frozen parts by name, as libraries made them: models in eval mode, tokenizers, processors."""

Made = Mapping[MediaType, torch.Tensor]
"""Media by type: pictures [B, C, H, W], videos [B, T, C, H, W], both from 0 to 1; sounds [B, C, L]."""


Lengths = Mapping[str, tuple[int, int]]
"""By the name of a tokenizer, how many tokens a prompt becomes, and how many of them are read."""


@attrs.frozen(kw_only=True)
class Pipeline:
    """A pipeline folder of diffusers, without its weights.

    Attributes:
        class_name: of the pipeline.
        index: what model_index.json says of each component: (library, class), or None for one that is not there.
        options: its other fields.
        configs: the configuration of each component that is there, by name.
    """

    class_name: str
    index: Mapping[str, tuple[str, str] | None]
    options: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class StreamGuidance:
    """What guidance is of a model that makes several media, beside its weight for the first one.

    Attributes:
        audio: weight of guidance for sound.
        perturbed: how far a velocity is led away from that of perturbed attention, in every medium; 0: not at all.
        isolated: weight of guidance away from media that do not attend to each other; 1: none.
        rescale: the share of the correction that brings back the deviation.
        blocks: whose attention is perturbed; none: those of the pipeline.
    """

    audio: float = 7.0
    perturbed: float = 1.0
    isolated: float = 3.0
    rescale: float = 0.7
    blocks: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Setting:
    """What a specification says of a pipeline beside its folder.

    Attributes:
        size: of what is made, one that the contract admits.
        guidance: the scale that a model with embedded guidance is told; read by no other.
        compiled: whether the blocks of the module are compiled.
        guidance_2: of the second of two transformers, where there is guidance; 0: as of the first.
        trained: the transformers that are trained; none: all.
        streams: what guidance is of several media; None of a single one.
    """

    size: Size
    guidance: float = 0.0
    compiled: bool = False
    guidance_2: float = 0.0
    trained: tuple[str, ...] = ()
    streams: StreamGuidance | None = None


@attrs.frozen(kw_only=True)
class NoiseLevels:
    """How a pipeline spaces the noise levels of its steps, at one size.

    Attributes:
        shift: of the even grid, applied once; that of `shift_of` where the number of steps counts.
        growth: what the shift is multiplied by for every step that is made.
        lowest: where the even grid ends before it is shifted; None: at 1 / steps.
        terminal: the last level before 0, to which the grid is stretched; None leaves it.
        solver: the method.
        strength: the share of a schedule's steps, the last ones, that is made where nothing is said.
        low, high: what is trained is asked at the levels from `low` up and below `high`, or up to it where it is 1; a part that
            stays frozen is asked at the others.
    """

    shift: float = 1.0
    growth: float = 1.0
    lowest: float | None = None
    terminal: float | None = None
    solver: Solver = "euler"
    strength: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def shift_of(self, steps: int) -> float:
        """The shift of a schedule of so many steps."""
        return float(self.shift * self.growth**steps)

    def trains_at(self, timestep: torch.Tensor) -> torch.Tensor:
        """Whether what is trained is asked at timesteps float32 [T], 1000 times a noise level; bool [T]."""
        below = timestep < self.high * 1000 if self.high < 1 else torch.ones_like(timestep, dtype=torch.bool)
        return (timestep >= self.low * 1000) & below


EVEN = NoiseLevels()
"""Those of a model without a scheduler of its own: an even grid."""


class ConditionPreparer(Protocol):
    """What makes conditions of requests."""

    @property
    def contract(self) -> PipelineIOContract:
        """What the checkpoint takes and makes."""
        ...

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """The conditions of one request, with a first dimension of 1.

        Args:
            parts: those of `contract.preparer`.
            request: one that the contract admits.
            negative: whether the negative ones are wanted; without a negative prompt they are those of an empty one.
        """
        ...


class PromptReader(Protocol):
    """What knows how much of a prompt is read."""

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for every tokenizer behind whose limit it would be cut in silence.

        Args:
            parts: the tokenizers of `contract.preparer`.
            prompt: the words.
        """
        ...


class OutputCodec(Protocol):
    """What makes clean latents of media, and media of latents."""

    @property
    def contract(self) -> PipelineIOContract:
        """What the checkpoint takes and makes."""
        ...

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, *] of media; the most likely ones, where a codec has a distribution.

        Args:
            parts: those of `contract.codec`.
            made: media of the adapter's size.
        """
        ...

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """The media of latents [B, *], float32."""
        ...


class FlowAdapter(FlowPolicy, ConditionPreparer, PromptReader, OutputCodec, Protocol):
    """A pipeline as functions, for one checkpoint and one size of what it makes.

    Its parameters are those of the component that is trained, `{name: tensor}` by the names in the file; of several
    components, which its contract names, every name begins with that of its own, as "transformer_2.". Encoding and
    decoding use frozen parts, which are given, and draw nothing: a result is a function of the parts and the request.
    """

    @property
    def size(self) -> Size:
        """Of what is made."""
        ...

    @property
    def levels(self) -> NoiseLevels:
        """How the pipeline samples."""
        ...

    @property
    def components(self) -> tuple[tuple[MediaType, tuple[int, ...]], ...]:
        """The shapes of the latents of each medium, in the order in which they stand in a state.

        The state of a single one has its shape. Several are laid flat, one behind the other.
        """
        ...
