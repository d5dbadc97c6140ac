"""What a specification says of models of text: how they draw tokens, and the algorithms that train them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from areno_fn.contracts.execution import DATASET_NONE, GENERATION_REWARD, ExecutionContract
from areno_fn.contracts.spec_base import (
    Coefficient,
    Natural,
    Positive,
    Rate,
    Rows,
    Samples,
    Scale,
    Spec,
    Tokens,
    Turns,
    Unit,
)

COLDEST = 1e-6
"""Least temperature that is not 0; logits divided by much less would overflow float32."""


class Sampling(Spec, frozen=True, kw_only=True):
    """The distribution tokens are drawn from. Truncation order: temperature, top-k, top-p, min-p.

    `temperature = 0` is greedy decoding, legal only for evaluation; any other is at least 1e-06.
    """

    max_tokens: Tokens = 64
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0


Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"]


class SFT(Spec, frozen=True, kw_only=True, tag="sft", tag_field="kind"):
    """Supervised fine-tuning: the negative log-likelihood of response tokens."""

    execution: ClassVar[ExecutionContract] = DATASET_NONE
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    aggregation: Aggregation = "token_mean"


class Sampled(Spec, frozen=True, kw_only=True):
    """What the algorithms have in common that learn from samples and rewards.

    `kl_coef` > 0 keeps a frozen snapshot of the phase's start as reference; every `reference_every` iterations (0:
    never) it becomes what the actor is then. `entropy_coef` > 0 adds the entropy of the distribution tokens are drawn from to
    what is maximised.
    """

    execution: ClassVar[ExecutionContract] = GENERATION_REWARD
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    samples: Samples = 8
    sampling: Sampling = field(default_factory=Sampling)
    kl_coef: Coefficient = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reference_every: Natural = 0
    entropy_coef: Coefficient = 0.0
    mask_truncated: bool = False
    minibatches: Rows = 1
    epochs: Turns = 1


class Grouped(Sampled, frozen=True, kw_only=True):
    """What the algorithms have in common that compare the samples of a prompt with each other."""

    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    scale: Literal["group", "batch", "none"] = "group"


class GRPO(Grouped, frozen=True, kw_only=True, tag="grpo", tag_field="kind"):
    """Group relative policy optimization.

    `baseline = "leave_one_out"` with `scale = "none"` is RLOO; both "batch", with `kl_in = "reward"`, is REINFORCE++.
    """

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    dual_clip: Rate = 0.0
    importance_cap: Rate = 0.0
    aggregation: Aggregation = "token_mean"


class GSPO(Grouped, frozen=True, kw_only=True, tag="gspo", tag_field="kind"):
    """Group sequence policy optimization: one ratio and one term a completion."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
    clip_high: Annotated[float, Meta(gt=0)] = 4e-4
    importance_cap: Rate = 0.0


class Critic(Spec, frozen=True, kw_only=True):
    """The role that estimates what a completion will be worth, and how it is trained.

    It begins every phase as a copy of the actor with a head of zeros, or the run as the classification folder `path`.
    It is trained `updates` times for every update of the actor, and alone for the first `warmup` iterations.
    """

    path: str = ""
    updates: Turns = 1
    warmup: Natural = 0
    clip: Annotated[float, Meta(gt=0)] = 0.5
    coef: Scale = 0.5


class PPO(Sampled, frozen=True, kw_only=True, tag="ppo", tag_field="kind"):
    """Proximal policy optimization with a critic: advantages of single tokens by generalised estimation.

    With `kl_target` above 0 the coefficient of the KL in the reward follows the measured KL of a completion.
    """

    roles: ClassVar[tuple[str, ...]] = ("actor", "critic")

    samples: Samples = 1
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: Rate = 0.0
    kl_horizon: Positive = 10_000
    critic: Critic = field(default_factory=Critic)
    gamma: Unit = 1.0
    lam: Unit = 0.95
    whiten: bool = True
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    dual_clip: Rate = 3.0
    importance_cap: Rate = 0.0
    aggregation: Aggregation = "token_mean"


PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]


class DPO(Spec, frozen=True, kw_only=True, tag="dpo", tag_field="kind"):
    """Direct preference optimization of pairs, against a frozen snapshot of the phase's start as reference.

    Every `reference_every` steps (0: never) the reference becomes what the actor is then.
    """

    execution: ClassVar[ExecutionContract] = DATASET_NONE
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    loss: PreferenceLoss = "sigmoid"
    beta: Scale = 0.1
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    reference_every: Natural = 0
