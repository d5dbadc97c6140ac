"""Algorithms of flow models whose decisions are the noisy denoising steps that were drawn."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Rate
from areno_fn.contracts.spec_flow import FlowGrouped, NoisyDenoising

Space = Literal["velocity", "mean", "gaussian"]
"""Where distances of transitions are measured; a row of the table of `areno_fn.steps.flow.objectives.coupled.apart`."""


class FlowCoupled(FlowGrouped, frozen=True, kw_only=True):
    """What these algorithms have in common. `kl_space` is where the distance from the reference is measured."""

    denoising: NoisyDenoising = field(default_factory=NoisyDenoising)
    kl_space: Space = "velocity"


class FlowClipped(FlowCoupled, frozen=True, kw_only=True):
    """What those have in common that clip a ratio."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 1e-4
    clip_high: Annotated[float, Meta(gt=0)] = 1e-4


class FlowGRPO(FlowClipped, frozen=True, kw_only=True, tag="flow_grpo", tag_field="kind"):
    """Group relative policy optimization of a flow model."""


class FlowGRPOGuard(FlowClipped, frozen=True, kw_only=True, tag="flow_grpo_guard", tag_field="kind"):
    """GRPO-Guard: Flow-GRPO with ratios that are centred and of one scale at all steps.

    With `guard_step_reweight` the term of a step is divided by its length, as the paper has it.
    """

    guard_step_reweight: bool = False


class FlowDPPO(FlowCoupled, frozen=True, kw_only=True, tag="flow_dppo", tag_field="kind"):
    """Flow-DPPO: no ratio is clipped; a step that has moved `threshold` or farther in `mask_space` has no gradient.

    That is where it has moved to where its advantage wants it, from the policy that drew.
    """

    threshold: Rate = 1e-6
    mask_space: Space = "gaussian"
