"""Algorithms of flow models that draw in any way, and noise again what they have drawn."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Coefficient, Natural, Rate, Scale, Spec, Turns, Unit, Weight
from areno_fn.contracts.spec_flow import Denoising, FlowGrouped, Guidance, Shift


class Forgetting(Spec, frozen=True, kw_only=True):
    """How a copy of a role follows it, s <- d s + (1 - d) p: as it is for `flat` optimizer steps of the phase, then by d.

    d = min(cap, start + rate (step - flat)).
    """

    start: Unit = 0.0
    flat: Natural = 0
    rate: Rate = 0.001
    cap: Annotated[float, Meta(gt=0, le=1)] = 0.5


class FlowNoised(FlowGrouped, frozen=True, kw_only=True):
    """What these algorithms have in common: what was drawn is noised to `terms` levels.

    They are drawn from the part `until` of the way from noise to data: as a distribution, with a `shift`, or as a "grid" of
    the levels that were drawn through.
    """

    denoising: Denoising = field(default_factory=lambda: Denoising(steps=10))
    times: Literal["uniform", "logit_normal", "grid"] = "uniform"
    shift: Shift = 1.0
    until: Annotated[float, Meta(gt=0, le=1)] = 1.0
    terms: Turns = 2


class FlowNFT(FlowNoised, frozen=True, kw_only=True, tag="flow_nft", tag_field="kind"):
    """DiffusionNFT: the velocity is drawn to samples with high rewards and pushed away from those with low ones.

    With `old`, a copy that follows the actor draws, and is what the velocity is pushed away from; else the actor is.
    """

    beta: Scale = 1.0
    old: Forgetting | None = None


class FlowAWM(FlowNoised, frozen=True, kw_only=True, tag="flow_awm", tag_field="kind"):
    """Advantage weighted matching: the clipped surrogate with minus a velocity error as log-probability.

    `ema_coef` weighs the distance from the average of the actor.
    """

    weighting: Literal["uniform", "sigma", "square", "huber", "ghuber"] = "uniform"
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 1e-2
    clip_high: Annotated[float, Meta(gt=0)] = 1e-2
    ema_coef: Coefficient = 0.0


class FlowWhole(FlowNoised, frozen=True, kw_only=True):
    """What those have in common that look at whole groups, whose samples share noise and level: mini-batches are of groups."""


class FlowDGPO(FlowWhole, frozen=True, kw_only=True, tag="flow_dgpo", tag_field="kind"):
    """DGPO: the better part of a group is preferred to the worse one, by how far both are from the reference.

    A copy `old` follows the actor after every optimizer step; a sample whose error has left it by more than `clip` to where
    its advantage wants it has no gradient (0: all have one). After `draw_old` optimizer steps of the phase the copy draws.
    """

    referred: ClassVar[bool] = True

    until: Annotated[float, Meta(gt=0, le=1)] = 0.6
    beta: Scale = 100.0
    clip: Rate = 1e-4
    old: Forgetting = field(default_factory=lambda: Forgetting(cap=0.3))
    draw_old: Natural = 200
    reference_guidance: Guidance = 1.0


class FlowCRD(FlowWhole, frozen=True, kw_only=True, tag="flow_crd", tag_field="kind"):
    """Centred reward distillation: the implicit reward of a sample is to differ within its group as its reward does.

    It is implicit against a copy `old`; another, `sampler`, draws; both follow the actor after every iteration. `temperature`
    weighs the mean of a group: evenly below 0, else by reward. The distance from the reference, which is led by
    `reference_guidance`, counts from `kl_floor` for the worst to `kl_coef` for the best.
    """

    until: Annotated[float, Meta(gt=0, le=1)] = 0.99
    beta: Scale = 1.0
    loss: Literal["mse", "bce"] = "mse"
    temperature: Weight = -1.0
    kl_coef: Coefficient = 0.1
    kl_floor: Coefficient = 1e-4
    reference_guidance: Guidance = 4.5
    old: Forgetting = field(default_factory=lambda: Forgetting(start=0.25, rate=0.005, cap=0.999))
    sampler: Forgetting = field(default_factory=lambda: Forgetting(flat=75, rate=0.0075, cap=0.999))


class FlowOnlineDPO(FlowNoised, frozen=True, kw_only=True, tag="flow_online_dpo", tag_field="kind"):
    """Diffusion-DPO of what was drawn: the best of a group is preferred to its worst; equal groups make no pair."""

    referred: ClassVar[bool] = True

    beta: Scale = 2000.0
    times: Literal["uniform", "logit_normal", "grid"] = "logit_normal"
    until: Annotated[float, Meta(gt=0, le=1)] = 0.99
    terms: Turns = 1


def copies_of(algorithm: FlowGrouped) -> dict[str, Forgetting]:
    """The copies of the actor that an algorithm keeps, by the names of their snapshots."""
    if isinstance(algorithm, FlowCRD):
        return {"old": algorithm.old, "sampler": algorithm.sampler}
    if isinstance(algorithm, FlowNFT | FlowDGPO) and algorithm.old is not None:
        return {"old": algorithm.old}
    return {}
