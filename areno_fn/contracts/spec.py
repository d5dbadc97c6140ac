"""The run specification. Structs only: no torch, no files, no cross-field rules (those are in `engine/plan.py`).

Unknown fields are refused, unions are tagged by `kind`, and lists carry names so that an error can say where.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Consistency, Name, Natural, Place, Positive, Rate, Rows, Scale, Tokens
from areno_fn.contracts.spec_base import Spec as Spec
from areno_fn.contracts.spec_data import ArithmeticData as ArithmeticData
from areno_fn.contracts.spec_data import HFData as HFData
from areno_fn.contracts.spec_data import JsonlData as JsonlData
from areno_fn.contracts.spec_data import ParquetData as ParquetData
from areno_fn.contracts.spec_data import StoredData as StoredData
from areno_fn.contracts.spec_flow import Denoising as Denoising
from areno_fn.contracts.spec_flow import DigitPairsData as DigitPairsData
from areno_fn.contracts.spec_flow import DigitsData as DigitsData
from areno_fn.contracts.spec_flow import FlowDPO as FlowDPO
from areno_fn.contracts.spec_flow import FlowGrouped as FlowGrouped
from areno_fn.contracts.spec_flow import FlowReferred as FlowReferred
from areno_fn.contracts.spec_flow import FlowSFT as FlowSFT
from areno_fn.contracts.spec_flow import Levels as Levels
from areno_fn.contracts.spec_flow import Medium as Medium
from areno_fn.contracts.spec_flow import NoisyDenoising as NoisyDenoising
from areno_fn.contracts.spec_flow import PipelineSpec as PipelineSpec
from areno_fn.contracts.spec_flow import StreamsSpec as StreamsSpec
from areno_fn.contracts.spec_flow import refers as refers
from areno_fn.contracts.spec_flow_coupled import FlowClipped as FlowClipped
from areno_fn.contracts.spec_flow_coupled import FlowCoupled as FlowCoupled
from areno_fn.contracts.spec_flow_coupled import FlowDPPO as FlowDPPO
from areno_fn.contracts.spec_flow_coupled import FlowGRPO as FlowGRPO
from areno_fn.contracts.spec_flow_coupled import FlowGRPOGuard as FlowGRPOGuard
from areno_fn.contracts.spec_flow_noised import FlowAWM as FlowAWM
from areno_fn.contracts.spec_flow_noised import FlowCRD as FlowCRD
from areno_fn.contracts.spec_flow_noised import FlowDGPO as FlowDGPO
from areno_fn.contracts.spec_flow_noised import FlowNFT as FlowNFT
from areno_fn.contracts.spec_flow_noised import FlowNoised as FlowNoised
from areno_fn.contracts.spec_flow_noised import FlowOnlineDPO as FlowOnlineDPO
from areno_fn.contracts.spec_flow_noised import FlowWhole as FlowWhole
from areno_fn.contracts.spec_flow_noised import Forgetting as Forgetting
from areno_fn.contracts.spec_flow_noised import copies_of as copies_of
from areno_fn.contracts.spec_matching import FewSteps as FewSteps
from areno_fn.contracts.spec_matching import FlowDistill as FlowDistill
from areno_fn.contracts.spec_matching import FlowDMD2 as FlowDMD2
from areno_fn.contracts.spec_matching import FlowMatched as FlowMatched
from areno_fn.contracts.spec_matching import FlowMatchedAlong as FlowMatchedAlong
from areno_fn.contracts.spec_matching import FlowTaught as FlowTaught
from areno_fn.contracts.spec_matching import FlowTDM as FlowTDM
from areno_fn.contracts.spec_matching import FlowTDMR1 as FlowTDMR1
from areno_fn.contracts.spec_matching import StudentDenoising as StudentDenoising
from areno_fn.contracts.spec_matching import Teacher as Teacher
from areno_fn.contracts.spec_matching import folders_of as folders_of
from areno_fn.contracts.spec_optimizers import AdamW8bitSpec as AdamW8bitSpec
from areno_fn.contracts.spec_optimizers import AdamWSpec as AdamWSpec
from areno_fn.contracts.spec_optimizers import Decay as Decay
from areno_fn.contracts.spec_optimizers import Group as Group
from areno_fn.contracts.spec_optimizers import MuonSpec as MuonSpec
from areno_fn.contracts.spec_optimizers import OptimizerSpec as OptimizerSpec
from areno_fn.contracts.spec_optimizers import Remainder as Remainder
from areno_fn.contracts.spec_optimizers import Schedule as Schedule
from areno_fn.contracts.spec_optimizers import SGDSpec as SGDSpec
from areno_fn.contracts.spec_rewards import ClipReward as ClipReward
from areno_fn.contracts.spec_rewards import FunctionReward as FunctionReward
from areno_fn.contracts.spec_rewards import HttpReward as HttpReward
from areno_fn.contracts.spec_rewards import ModelReward as ModelReward
from areno_fn.contracts.spec_rewards import RewardSpec as RewardSpec
from areno_fn.contracts.spec_tokens import COLDEST as COLDEST
from areno_fn.contracts.spec_tokens import DPO as DPO
from areno_fn.contracts.spec_tokens import GRPO as GRPO
from areno_fn.contracts.spec_tokens import GSPO as GSPO
from areno_fn.contracts.spec_tokens import PPO as PPO
from areno_fn.contracts.spec_tokens import SFT as SFT
from areno_fn.contracts.spec_tokens import Aggregation as Aggregation
from areno_fn.contracts.spec_tokens import Critic as Critic
from areno_fn.contracts.spec_tokens import Grouped as Grouped
from areno_fn.contracts.spec_tokens import PreferenceLoss as PreferenceLoss
from areno_fn.contracts.spec_tokens import Sampled as Sampled
from areno_fn.contracts.spec_tokens import Sampling as Sampling

# ---------------------------------------------------------------------------------------- model, tokenizer


class ScratchModel(Spec, frozen=True, kw_only=True, tag="scratch", tag_field="kind"):
    """A randomly initialised model; `config` holds the fields of the family's Hugging Face configuration.

    Of `digits_dit`, a flow model, it holds those of the diffusers configuration, without `_class_name`.
    """

    family: str
    config: dict[str, Any]


class HFModel(Spec, frozen=True, kw_only=True, tag="hf", tag_field="kind"):
    """A Hugging Face folder, or one of a pipeline of diffusers, whose transformer is trained.

    `dtype` is that of the trained parameters in memory; "source" keeps each file's own. `pipeline` is for the latter alone.
    """

    path: Place
    dtype: Literal["source", "float32", "bfloat16"] = "source"
    pipeline: PipelineSpec | None = None


class ByteTokenizer(Spec, frozen=True, kw_only=True, tag="byte", tag_field="kind"):
    """256 bytes, then BOS, EOS and PAD. Needs no file."""


class HFTokenizer(Spec, frozen=True, kw_only=True, tag="hf", tag_field="kind"):
    """The tokenizer and chat template of a Hugging Face folder."""

    path: Place


# ---------------------------------------------------------------------------------------- data, rewards


DataSpec = JsonlData | ParquetData | HFData | ArithmeticData | DigitsData | DigitPairsData


# ---------------------------------------------------------------------------------------- algorithms

RewardedFlow = FlowGRPO | FlowGRPOGuard | FlowDPPO | FlowNFT | FlowAWM | FlowDGPO | FlowCRD | FlowOnlineDPO
"""The algorithms of flow models that learn from samples and rewards."""

TaughtFlow = FlowDMD2 | FlowTDM | FlowTDMR1 | FlowDistill
"""The algorithms of flow models that learn from a teacher."""

AlgorithmSpec = SFT | DPO | GRPO | GSPO | PPO | FlowSFT | FlowDPO | RewardedFlow | TaughtFlow

FlowAlgorithm = FlowSFT | FlowReferred | FlowTaught
"""The algorithms of models that make pictures."""

Repeated = Sampled | FlowGrouped
"""The algorithms that draw several samples of a prompt and are moved by mini-batches of them."""


# ---------------------------------------------------------------------------------------- the run


class Batch(Spec, frozen=True, kw_only=True):
    """`rows` of data a step (prompts for generation), split into micro-batches of at most `micro_tokens` tokens.

    Flow models draw and train on at most `micro_rows` pictures at once (0: all), but whole groups where these are
    compared. `max_length` bounds prompt plus response; `overlong` says what happens to a longer training row.
    """

    rows: Rows = 16
    micro_tokens: Positive = 8192
    micro_rows: Natural = 0
    max_length: Tokens = 1024
    overlong: Literal["error", "truncate", "drop"] = "error"


class Evaluation(Spec, frozen=True, kw_only=True):
    """Held-out evaluation by generation, before and after every phase and every `every` steps (0: only then).

    A model of text draws by `sampling`; a flow model by `denoising`, without noise in its steps.
    """

    data: list[DataSpec]
    rewards: list[RewardSpec]
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    denoising: Denoising = field(default_factory=Denoising)
    every: Natural = 0
    limit: Natural = 0
    batch: Positive = 256


class EMA(Spec, frozen=True, kw_only=True):
    """An average of the actor over the phase, s <- d s + (1 - d) p, updated every `every` optimizer steps.

    `schedule` says what d is at the update after n others: `decay`, min(decay, (1 + n) / (10 + n)) for "warmup", or
    decay min(1, n / ramp) for "linear". Updates up to the optimizer step `start` copy the actor.
    """

    decay: Annotated[float, Meta(gt=0, lt=1)] = 0.999
    schedule: Literal["constant", "warmup", "linear"] = "warmup"
    ramp: Natural = 0
    every: Positive = 1
    start: Natural = 0
    evaluate: bool = True
    export: bool = True


Snapshot = Literal["reference", "ema", "old", "sampler", "slow"]


class Phase(Spec, frozen=True, kw_only=True):
    """One algorithm on one data set. Give `steps`, or `epochs` for an algorithm that reads a data set.

    A step is one optimizer step for data-set algorithms and one rollout iteration for generating ones.
    `stop_at` above 0 ends the phase early, once an evaluation's score reaches it. `denoising` is how its evaluations draw,
    in the place of that of `evaluation`. What is in `offload` stays in the memory of the host between its uses. With `remat`
    k every k-th layer, from the first, keeps its input alone for the backward pass, which computes the layer again; 0: none,
    1: all. With `capture` an update of a model of text is replayed as a graph of a GPU, and its micro-batches are padded to few
    sizes, of which each has a graph; padding weighs 0.
    """

    name: Name
    algorithm: AlgorithmSpec
    data: list[DataSpec]
    steps: Natural = 0
    epochs: Natural = 0
    stop_at: Rate = 0.0
    denoising: Denoising | None = None
    batch: Batch = field(default_factory=Batch)
    optimizers: list[OptimizerSpec] = field(default_factory=lambda: [AdamWSpec()])
    rewards: list[RewardSpec] = []
    ema: EMA | None = None
    offload: list[Snapshot] = []
    remat: Natural = 0
    capture: bool = False


class FullFinetune(Spec, frozen=True, kw_only=True, tag="full", tag_field="kind"):
    """Every parameter is trained."""


class Lora(Spec, frozen=True, kw_only=True, tag="lora", tag_field="kind"):
    """Low-rank adapters are trained beside weights that stay as they are: W + scale B A, with scale = alpha / rank.

    `targets` are names of linear maps as in the model's files, or the ends of names, for example "q_proj". With
    `adapter` the run starts from a PEFT folder, which says rank, alpha, targets and rslora itself. With `merge_rollouts`
    completions are drawn with merged weights, whose log-probabilities are those of training up to roundings.
    """

    rank: Annotated[int, Meta(ge=1, le=65_536)] = 16
    alpha: Scale = 32.0
    targets: list[str] = []
    rslora: bool = False
    adapter: str = ""
    merge_rollouts: bool = False


FinetuneSpec = FullFinetune | Lora


class Checkpoint(Spec, frozen=True, kw_only=True):
    """Resumable checkpoints every `every` steps (0: only at the end of a phase); the newest `keep` stay."""

    every: Natural = 0
    keep: Positive = 2


class Export(Spec, frozen=True, kw_only=True):
    """The Hugging Face folder written at the end. `dtype` "source" keeps the source's (float32 from scratch).

    Roles that serve the training alone are left out, unless `roles` names them: `critic` is then written beside it, as a
    classification folder with one label.
    """

    dtype: Literal["source", "float32", "bfloat16"] = "source"
    roles: list[Name] = []
    shard_bytes: Annotated[int, Meta(ge=1, le=10**15)] = 5_000_000_000


class Log(Spec, frozen=True, kw_only=True):
    """What is recorded while a run goes on."""

    tensorboard: bool = True
    samples: Natural = 4
    samples_every: Positive = 20


class RunSpec(Spec, frozen=True, kw_only=True):
    """A whole run: a model, and phases applied to it in order.

    With `consistency = "bitwise"` the log-probabilities that a rollout records are those of the forward pass of training, bit
    for bit, whatever either is batched with. It is for models of text on a GPU with parameters in bfloat16.
    """

    version: Literal[2] = 2
    name: Name = "run"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    out: str = "out/run"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ScratchModel | HFModel
    consistency: Consistency = "ordinary"
    finetune: FinetuneSpec = field(default_factory=FullFinetune)
    tokenizer: ByteTokenizer | HFTokenizer | None = None
    phases: Annotated[list[Phase], Meta(min_length=1)]
    evaluation: Evaluation | None = None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    export: Export = field(default_factory=Export)
    log: Log = field(default_factory=Log)
