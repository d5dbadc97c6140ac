"""Optimizers in a run specification."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Name, Natural, Rate, Spec


class Schedule(Spec, frozen=True, kw_only=True):
    """Learning rate as a function of the 1-based step: warm-up, then the named decay to `min_lr`.

    `decay_steps = 0` means the phase's own number of optimizer steps. `stable_steps` is used by "wsd" alone.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: Natural = 0
    stable_steps: Natural = 0
    decay_steps: Natural = 0
    min_lr: Annotated[float, Meta(ge=0, le=1000)] = 0.0


Learning = Annotated[float, Meta(gt=0, le=1000)]
Shrinking = Annotated[float, Meta(ge=0, le=1000)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
Decay = Literal["matrices", "hidden", "all"]
"""What decays: matrices, all but embeddings and heads of those, or everything."""


class Group(Spec, frozen=True, kw_only=True):
    """Parameters with a learning rate and a weight decay of their own; the decay is on all of them.

    `paths` are patterns of paths in the parameter tree, in which `*` stands for anything: "embed", "layers.*.qkv".
    """

    name: Name
    paths: Annotated[list[str], Meta(min_length=1)]
    lr: Learning
    weight_decay: Shrinking


class AdamWSpec(Spec, frozen=True, kw_only=True, tag="adamw", tag_field="kind"):
    """AdamW with float32 master weights and moments.

    With `states = "stored"` there are no masters, and moments have the dtype of the parameters: 4 bytes for a parameter in
    bfloat16 in the place of 12, but a change of less than 1/256 of a weight is rounded away.
    """

    role: Name = "actor"
    lr: Learning = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    weight_decay: Shrinking = 0.01
    decay: Decay = "matrices"
    max_grad_norm: Rate = 1.0
    states: Literal["float32", "stored"] = "float32"
    schedule: Schedule = field(default_factory=Schedule)
    groups: list[Group] = []


class AdamW8bitSpec(Spec, frozen=True, kw_only=True, tag="adamw8bit", tag_field="kind"):
    """AdamW whose moments take one byte each, in blocks of 256; no update is larger than 4 learning rates, decay apart."""

    role: Name = "actor"
    lr: Learning = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    weight_decay: Shrinking = 0.01
    decay: Decay = "matrices"
    max_grad_norm: Rate = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    groups: list[Group] = []


class SGDSpec(Spec, frozen=True, kw_only=True, tag="sgd", tag_field="kind"):
    """Gradient descent with momentum; weight decay is added to the gradient, as in `torch.optim.SGD`."""

    role: Name = "actor"
    lr: Learning = 1e-3
    momentum: Beta = 0.9
    nesterov: bool = False
    weight_decay: Shrinking = 0.0
    decay: Decay = "matrices"
    max_grad_norm: Rate = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    groups: list[Group] = []


class Remainder(Spec, frozen=True, kw_only=True):
    """The AdamW beside Muon: embeddings, heads, norms, biases, and hidden matrices that a group of it names."""

    lr: Learning = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    weight_decay: Shrinking = 0.01
    decay: Decay = "matrices"
    groups: list[Group] = []


class MuonSpec(Spec, frozen=True, kw_only=True, tag="muon", tag_field="kind"):
    """Muon for hidden matrices, each block of a fused one apart, and AdamW for what is left; one clip, one schedule."""

    role: Name = "actor"
    lr: Learning = 0.02
    momentum: Beta = 0.95
    nesterov: bool = True
    adjust: Literal["original", "match_rms_adamw", "none"] = "original"
    iterations: Annotated[int, Meta(ge=1, le=99)] = 5
    weight_decay: Shrinking = 0.01
    max_grad_norm: Rate = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    groups: list[Group] = []
    adamw: Remainder = field(default_factory=Remainder)


OptimizerSpec = AdamWSpec | AdamW8bitSpec | SGDSpec | MuonSpec
