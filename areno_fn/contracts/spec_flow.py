"""What a specification says of flow models: their data, how they draw, and their algorithms."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from areno_fn.contracts.execution import DATASET_NONE, GENERATION_REWARD, ExecutionContract
from areno_fn.contracts.spec_base import Natural, Positive, Rate, Spec, Unit

Medium = Literal["text", "pictures"]
"""What a model makes. Algorithms, data and rewards are of the medium of their model."""


class DigitsData(Spec, frozen=True, kw_only=True, tag="digits", tag_field="kind"):
    """The 8 x 8 pictures of handwritten digits of scikit-learn with their classes, split by a hash of the pixels.

    What an algorithm that draws takes of a row is its class.
    """

    split: Literal["train", "heldout"] = "train"
    limit: Natural = 0
    name: str = ""
    weight: Rate = 0.0


class Levels(Spec, frozen=True, kw_only=True):
    """The noise levels of a flow model's steps, from noise to data, as `areno_fn.steps.flow.schedule` makes them.

    With `guidance` above 1 the velocity is led away from what the model says without a condition, which it must have
    learned, by a `dropout` for example.
    """

    steps: Positive = 20
    shift: Annotated[float, Meta(gt=0)] = 1.0
    guidance: Annotated[float, Meta(ge=1)] = 1.0


class Denoising(Levels, frozen=True, kw_only=True):
    """How a flow model draws without noise in its steps: by Euler's steps, or by the multistep solver UniPC."""

    solver: Literal["euler", "unipc"] = "euler"


class NoisyDenoising(Levels, frozen=True, kw_only=True):
    """How it draws with noise in every step but the last, so that what is drawn has a probability.

    The level is eta in the table of `areno_fn.steps.flow.transition.transition`, at most 1 for "cps".
    """

    steps: Annotated[int, Meta(ge=2)] = 10
    dynamics: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    level: Annotated[float, Meta(gt=0)] = 0.7


Times = Literal["uniform", "logit_normal"]
"""Distributions of noise levels."""


class FlowSFT(Spec, frozen=True, kw_only=True, tag="flow_sft", tag_field="kind"):
    """Supervised training of a flow model: the squared error of its velocity at a random noise level of every picture.

    A share `dropout` of the pictures is trained on without its condition, so that guidance has what it leads away from.
    """

    execution: ClassVar[ExecutionContract] = DATASET_NONE
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    times: Times = "logit_normal"
    shift: Annotated[float, Meta(gt=0)] = 1.0
    weighting: Literal["velocity", "data", "inverse_square", "cosmap"] = "velocity"
    dropout: Unit = 0.0


class FlowGrouped(Spec, frozen=True, kw_only=True):
    """What the algorithms of flow models have in common that compare the samples of a prompt with each other.

    `kl_coef` > 0 keeps a frozen snapshot of the phase's start as reference, from whose velocity the distance is measured;
    every `reference_every` iterations (0: never) it becomes what the actor is then.
    """

    execution: ClassVar[ExecutionContract] = GENERATION_REWARD
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    samples: Positive = 8
    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    kl_coef: Rate = 0.0
    reference_every: Natural = 0
    minibatches: Positive = 1
    epochs: Positive = 1


class FlowGRPO(FlowGrouped, frozen=True, kw_only=True, tag="flow_grpo", tag_field="kind"):
    """Group relative policy optimization of a flow model: its noisy denoising steps are the decisions.

    With `kl_space` the distance from the reference is measured elsewhere.
    """

    denoising: NoisyDenoising = field(default_factory=NoisyDenoising)
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 1e-4
    clip_high: Annotated[float, Meta(gt=0)] = 1e-4
    kl_space: Literal["velocity", "mean", "gaussian"] = "velocity"


class FlowNoised(FlowGrouped, frozen=True, kw_only=True):
    """What the algorithms have in common that draw without noise, and noise what they have drawn to `terms` levels each."""

    denoising: Denoising = field(default_factory=lambda: Denoising(steps=10))
    times: Times = "uniform"
    shift: Annotated[float, Meta(gt=0)] = 1.0
    terms: Positive = 2
    max_advantage: Annotated[float, Meta(gt=0)] = 5.0


class FlowNFT(FlowNoised, frozen=True, kw_only=True, tag="flow_nft", tag_field="kind"):
    """DiffusionNFT: the velocity is drawn to samples with high rewards and pushed away from those with low ones."""

    beta: Annotated[float, Meta(gt=0)] = 1.0


class FlowAWM(FlowNoised, frozen=True, kw_only=True, tag="flow_awm", tag_field="kind"):
    """Advantage weighted matching: the clipped surrogate with minus a velocity error as log-probability."""

    weighting: Literal["uniform", "sigma", "square", "huber", "ghuber"] = "uniform"
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 1e-2
    clip_high: Annotated[float, Meta(gt=0)] = 1e-2
