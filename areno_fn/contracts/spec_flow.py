"""What a specification says of flow models: their data, how they draw, and algorithms that read a data set."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from areno_fn.contracts.execution import DATASET_NONE, GENERATION_REWARD, ExecutionContract
from areno_fn.contracts.spec_base import Coefficient, Natural, Place, Rate, Rows, Samples, Scale, Spec, Turns, Unit

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


class DigitPairsData(Spec, frozen=True, kw_only=True, tag="digit_pairs", tag_field="kind"):
    """Pairs of these pictures: one of its class is preferred to one of another class in its place."""

    split: Literal["train", "heldout"] = "train"
    limit: Natural = 0
    name: str = ""
    weight: Rate = 0.0


Side = Annotated[int, Meta(ge=0, le=16_384)]
"""Of a picture, in pixels."""

Guidance = Annotated[float, Meta(ge=1, le=1000)]
"""Weight of classifier-free guidance; 1 for none."""

GuidanceOrNone = Annotated[float, Meta(ge=0, le=1000)]
"""The same, where 0 is for what is usual."""

Shift = Annotated[float, Meta(ge=1e-3, le=1000)]
"""Of noise levels; models tell a thousand of them apart."""


class StreamsSpec(Spec, frozen=True, kw_only=True):
    """What guidance is of a model that makes video with its sound, where a denoising has any, as LTX-2 is sampled.

    The guidance of the denoising is that of the video, `audio` that of the sound. Both are led away from what the model says
    with perturbed attention in some `blocks`, and from what it says of either alone; each asks the model once more. Then the
    deviation of each stream is brought back by the share `rescale`.
    """

    audio: Guidance = 7.0
    perturbed: Coefficient = 1.0
    isolated: Guidance = 3.0
    rescale: Unit = 0.7
    blocks: list[Annotated[int, Meta(ge=0, le=10_000)]] = field(default_factory=list)


class PipelineSpec(Spec, frozen=True, kw_only=True):
    """What a pipeline of diffusers makes, and with which frozen parts.

    Sizes are exact, and those of the model where they are 0. `guidance` is the scale that a model with embedded guidance is
    told (0: as its family is used); classifier-free guidance is that of the denoising. `dtype` is that of the frozen parts
    in memory. `parts` are other folders, by the component that each takes the place of.

    Of a model with two transformers, such as Wan 2.2 A14B, `trained` names those that are trained, by component; the others
    stay as they are, and are asked at their noise levels. Where there is guidance, `guidance_2` is that of the second one.
    """

    height: Side = 0
    width: Side = 0
    frames: Annotated[int, Meta(ge=0, le=10_000)] = 0
    guidance: GuidanceOrNone = 0.0
    guidance_2: GuidanceOrNone = 0.0
    compile: bool = False
    dtype: Literal["source", "float32", "bfloat16"] = "source"
    parts: dict[str, Place] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    streams: StreamsSpec | None = None


Steps = Annotated[int, Meta(ge=1, le=1000)]
"""Steps from noise to data; models tell a thousand levels apart."""


class Levels(Spec, frozen=True, kw_only=True):
    """The noise levels of a flow model's steps, from noise to data, as `areno_fn.steps.flow.schedule` makes them.

    With `guidance` above 1 the velocity is led away from what the model says without a condition, which it must have
    learned, by a `condition_dropout` for example. A `shift` of 0 spaces them as the model's own scheduler does, which is
    evenly where it has none.
    """

    steps: Steps = 20
    shift: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    guidance: Guidance = 1.0


class Denoising(Levels, frozen=True, kw_only=True):
    """How a flow model draws without noise in its steps: by Euler's steps, or by the multistep solver UniPC.

    A model that begins with a video makes the last `strength` of the steps, from the video with as much noise as these begin
    with; 0 stands for the share of its pipeline.
    """

    solver: Literal["euler", "unipc"] = "euler"
    strength: Unit = 0.0


class NoisyDenoising(Levels, frozen=True, kw_only=True):
    """How it draws with noise in some steps, so that what is drawn has a probability; these are trained on.

    The level is eta in the table of `areno_fn.steps.flow.transition.transition`, at most 1 for "cps". Of the steps `noisy`,
    by default all but the last, every iteration takes `count` anew, with `window` successive ones. `strength` is that of
    `Denoising`; the steps that are made are then counted from 0.
    """

    steps: Annotated[int, Meta(ge=2, le=1000)] = 10
    dynamics: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    level: Annotated[float, Meta(gt=0, le=100)] = 0.7
    noisy: list[int] = field(default_factory=list)
    count: Natural = 0
    window: bool = False
    strength: Unit = 0.0


Times = Literal["uniform", "logit_normal"]
"""Distributions of noise levels."""


class FlowSFT(Spec, frozen=True, kw_only=True, tag="flow_sft", tag_field="kind"):
    """Supervised training of a flow model: the squared error of its velocity at a random noise level of every picture.

    A share `condition_dropout` of the pictures is trained on without its condition, so that guidance has what it leads away from.
    """

    execution: ClassVar[ExecutionContract] = DATASET_NONE
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    times: Times = "logit_normal"
    shift: Shift = 1.0
    weighting: Literal["velocity", "data", "inverse_square", "cosmap"] = "velocity"
    condition_dropout: Unit = 0.0


class FlowReferred(Spec, frozen=True, kw_only=True):
    """What the algorithms of flow models have in common that can be held near frozen parameters.

    These are a snapshot of the phase's start, which every `reference_every` iterations (0: never) becomes what the actor is
    then, or, as "base", the model without its adapters. Algorithms that are `referred` cannot do without.
    """

    roles: ClassVar[tuple[str, ...]] = ("actor",)
    referred: ClassVar[bool] = False

    reference: Literal["start", "base"] = "start"
    reference_every: Natural = 0


class FlowDPO(FlowReferred, frozen=True, kw_only=True, tag="flow_dpo", tag_field="kind"):
    """Diffusion-DPO of pairs of pictures: the velocity error of the preferred one is to fall below the other's.

    Both share noise and level, of which every pair has `terms`; each has its own condition. `until` is the part of the
    way from noise to data that levels are drawn from.
    """

    execution: ClassVar[ExecutionContract] = DATASET_NONE
    referred: ClassVar[bool] = True

    beta: Scale = 2000.0
    times: Times = "logit_normal"
    shift: Shift = 1.0
    until: Annotated[float, Meta(gt=0, le=1)] = 1.0
    terms: Turns = 1


class FlowGrouped(FlowReferred, frozen=True, kw_only=True):
    """What the algorithms of flow models have in common that compare the samples of a prompt with each other.

    Several rewards are added by weight before they are compared, or with `combine = "each"` each is compared within its
    group first, and the sum over the batch (GDPO). `kl_coef` > 0 weighs the distance from the reference. With
    `draw_with = "ema"` the average of the actor draws.
    """

    execution: ClassVar[ExecutionContract] = GENERATION_REWARD

    samples: Samples = 8
    combine: Literal["sum", "each"] = "sum"
    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    max_advantage: Annotated[float, Meta(gt=0)] = 5.0
    kl_coef: Coefficient = 0.0
    draw_with: Literal["actor", "ema"] = "actor"
    minibatches: Rows = 1
    epochs: Turns = 1


def refers(algorithm: FlowReferred) -> bool:
    """Whether an algorithm compares with frozen parameters."""
    return algorithm.referred or (isinstance(algorithm, FlowGrouped) and algorithm.kl_coef > 0)
