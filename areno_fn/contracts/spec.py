"""The run specification. Structs only: no torch, no files, no cross-field rules (those are in `engine/plan.py`).

Unknown fields are refused, unions are tagged by `kind`, and lists carry names so that an error can say where.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from areno_fn.contracts.execution import DATASET_NONE, GENERATION_REWARD, ExecutionContract

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(ge=0)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]+$")]


class Spec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all specification structs."""


# ---------------------------------------------------------------------------------------- model, tokenizer


class ScratchModel(Spec, frozen=True, kw_only=True, tag="scratch", tag_field="kind"):
    """A randomly initialised model; `config` holds the fields of the family's Hugging Face configuration."""

    family: str
    config: dict[str, Any]


class HFModel(Spec, frozen=True, kw_only=True, tag="hf", tag_field="kind"):
    """A Hugging Face folder. `dtype` is that of the parameters in memory; "source" keeps each file's own."""

    path: str
    dtype: Literal["source", "float32", "bfloat16"] = "source"


class ByteTokenizer(Spec, frozen=True, kw_only=True, tag="byte", tag_field="kind"):
    """256 bytes, then BOS, EOS and PAD. Needs no file."""


class HFTokenizer(Spec, frozen=True, kw_only=True, tag="hf", tag_field="kind"):
    """The tokenizer and chat template of a Hugging Face folder."""

    path: str


# ---------------------------------------------------------------------------------------- data, rewards


class JsonlData(Spec, frozen=True, kw_only=True, tag="jsonl", tag_field="kind"):
    """A file with one JSON object a line, recognised by its keys."""

    path: str


class ArithmeticData(Spec, frozen=True, kw_only=True, tag="arithmetic", tag_field="kind"):
    """Sums `a+b=` of two numbers with exactly `digits` digits, split by a hash into train and held-out pairs."""

    digits: Annotated[int, Meta(ge=1, le=6)] = 2
    count: Positive = 4096
    split: Literal["train", "heldout"] = "train"
    seed: int = 0


DataSpec = JsonlData | ArithmeticData


class RewardSpec(Spec, frozen=True, kw_only=True):
    """A reward `package.module:function`, called as `function(rows, completions) -> list[float]`."""

    function: str
    weight: float = 1.0
    name: str = ""


COLDEST = 1e-6
"""Least temperature that is not 0; logits divided by much less would overflow float32."""


class Sampling(Spec, frozen=True, kw_only=True):
    """The distribution tokens are drawn from. Truncation order: temperature, top-k, top-p, min-p.

    `temperature = 0` is greedy decoding, legal only for evaluation; any other is at least `COLDEST`.
    """

    max_tokens: Positive = 64
    temperature: Rate = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0


# ---------------------------------------------------------------------------------------- optimizers


class Schedule(Spec, frozen=True, kw_only=True):
    """Learning rate as a function of the 1-based step: warm-up, then the named decay to `min_lr`.

    `decay_steps = 0` means the phase's own number of optimizer steps. `stable_steps` is used by "wsd" alone.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: Natural = 0
    stable_steps: Natural = 0
    decay_steps: Natural = 0
    min_lr: Rate = 0.0


class AdamWSpec(Spec, frozen=True, kw_only=True, tag="adamw", tag_field="kind"):
    """AdamW with float32 master weights and moments; weight decay on matrices only."""

    role: Name = "actor"
    lr: Annotated[float, Meta(gt=0)] = 1e-6
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Rate = 0.01
    max_grad_norm: Rate = 1.0
    schedule: Schedule = field(default_factory=Schedule)


OptimizerSpec = AdamWSpec


# ---------------------------------------------------------------------------------------- algorithms

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"]


class SFT(Spec, frozen=True, kw_only=True, tag="sft", tag_field="kind"):
    """Supervised fine-tuning: the negative log-likelihood of response tokens."""

    execution: ClassVar[ExecutionContract] = DATASET_NONE
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    aggregation: Aggregation = "token_mean"


class GRPO(Spec, frozen=True, kw_only=True, tag="grpo", tag_field="kind"):
    """Group relative policy optimization. `kl_coef` > 0 keeps a frozen snapshot of the phase's start as reference."""

    execution: ClassVar[ExecutionContract] = GENERATION_REWARD
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    samples: Positive = 8
    sampling: Sampling = field(default_factory=Sampling)
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    kl_coef: Rate = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    scale: Literal["group", "batch", "none"] = "group"
    aggregation: Aggregation = "token_mean"
    mask_truncated: bool = False
    minibatches: Positive = 1
    epochs: Positive = 1


AlgorithmSpec = SFT | GRPO


# ---------------------------------------------------------------------------------------- the run


class Batch(Spec, frozen=True, kw_only=True):
    """`rows` of data a step (prompts for generation), split into micro-batches of at most `micro_tokens` tokens.

    `max_length` bounds prompt plus response; `overlong` says what happens to a longer training row.
    """

    rows: Positive = 16
    micro_tokens: Positive = 8192
    max_length: Positive = 1024
    overlong: Literal["error", "truncate", "drop"] = "error"


class Evaluation(Spec, frozen=True, kw_only=True):
    """Held-out evaluation by generation, before and after every phase and every `every` steps (0: only then)."""

    data: list[DataSpec]
    rewards: list[RewardSpec]
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    every: Natural = 0
    limit: Natural = 0
    batch: Positive = 256


class Phase(Spec, frozen=True, kw_only=True):
    """One algorithm on one data set. Give `steps`, or `epochs` for an algorithm that reads a data set.

    A step is one optimizer step for data-set algorithms and one rollout iteration for generating ones.
    `stop_at` above 0 ends the phase early, once an evaluation's score reaches it.
    """

    name: Name
    algorithm: AlgorithmSpec
    data: list[DataSpec]
    steps: Natural = 0
    epochs: Natural = 0
    stop_at: Rate = 0.0
    batch: Batch = field(default_factory=Batch)
    optimizers: list[OptimizerSpec] = field(default_factory=lambda: [AdamWSpec()])
    rewards: list[RewardSpec] = []


class FullFinetune(Spec, frozen=True, kw_only=True, tag="full", tag_field="kind"):
    """Every parameter is trained."""


class Lora(Spec, frozen=True, kw_only=True, tag="lora", tag_field="kind"):
    """Low-rank adapters are trained beside weights that stay as they are: W + scale B A, with scale = alpha / rank.

    `targets` are names of linear maps as in the model's files, or the ends of names, for example "q_proj". With
    `adapter` the run starts from a PEFT folder, which says rank, alpha, targets and rslora itself.
    """

    rank: Positive = 16
    alpha: Annotated[float, Meta(gt=0)] = 32.0
    targets: list[str] = []
    rslora: bool = False
    adapter: str = ""


FinetuneSpec = FullFinetune | Lora


class Checkpoint(Spec, frozen=True, kw_only=True):
    """Resumable checkpoints every `every` steps (0: only at the end of a phase); the newest `keep` stay."""

    every: Natural = 0
    keep: Positive = 2


class Export(Spec, frozen=True, kw_only=True):
    """The Hugging Face folder written at the end. `dtype` "source" keeps the source's (float32 from scratch)."""

    dtype: Literal["source", "float32", "bfloat16"] = "source"
    shard_bytes: Positive = 5_000_000_000


class Log(Spec, frozen=True, kw_only=True):
    """What is recorded while a run goes on."""

    tensorboard: bool = True
    samples: Natural = 4
    samples_every: Positive = 20


class RunSpec(Spec, frozen=True, kw_only=True):
    """A whole run: a model, and phases applied to it in order."""

    version: Literal[1] = 1
    name: Name = "run"
    seed: Natural = 0
    out: str = "out/run"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ScratchModel | HFModel
    finetune: FinetuneSpec = field(default_factory=FullFinetune)
    tokenizer: ByteTokenizer | HFTokenizer | None = None
    phases: Annotated[list[Phase], Meta(min_length=1)]
    evaluation: Evaluation | None = None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    export: Export = field(default_factory=Export)
    log: Log = field(default_factory=Log)
