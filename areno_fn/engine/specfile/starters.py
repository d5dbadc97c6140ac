"""Specifications to start from, one for each of the usual wishes."""

from __future__ import annotations

from collections.abc import Callable

from areno_fn.contracts.spec import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    SFT,
    AdamWSpec,
    ArithmeticData,
    Batch,
    ByteTokenizer,
    Checkpoint,
    Critic,
    Evaluation,
    FunctionReward,
    HFModel,
    JsonlData,
    Phase,
    RunSpec,
    Sampling,
    Schedule,
    ScratchModel,
)
from areno_fn.engine.specfile.flow_starters import flow, pipeline

_EXACT = FunctionReward(function="areno_fn.world.rewards:exact_match", name="exact_match")
_DRAWN = Sampling(max_tokens=256)


def quickstart() -> RunSpec:
    """A small model that learns two-digit addition from nothing: a short supervised phase, then rewards."""
    sums = ArithmeticData(digits=2, count=7000)
    adamw = AdamWSpec(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, schedule=Schedule(warmup_steps=20))
    decaying = Schedule(kind="linear", warmup_steps=5, min_lr=4e-5)
    return RunSpec(
        name="quickstart",
        out="out/quickstart",
        model=ScratchModel(
            family="qwen3",
            config={
                "vocab_size": 259,
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "head_dim": 16,
                "max_position_embeddings": 64,
                "initializer_range": 0.05,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
            },
        ),
        tokenizer=ByteTokenizer(),
        phases=[
            Phase(
                name="sft",
                steps=600,
                stop_at=0.45,
                algorithm=SFT(),
                data=[sums],
                batch=Batch(rows=64, max_length=32),
                optimizers=[adamw],
            ),
            Phase(
                name="grpo",
                steps=150,
                algorithm=GRPO(minibatches=2, sampling=Sampling(max_tokens=5)),
                data=[sums],
                batch=Batch(rows=64, max_length=32),
                optimizers=[AdamWSpec(lr=4e-4, betas=(0.9, 0.99), weight_decay=0.0, schedule=decaying)],
                rewards=[_EXACT],
            ),
        ],
        evaluation=Evaluation(
            data=[ArithmeticData(digits=2, count=512, split="heldout")],
            rewards=[_EXACT],
            sampling=Sampling(max_tokens=5, temperature=0.0),
            every=25,
            batch=512,
        ),
        checkpoint=Checkpoint(every=50),
    )


def sft() -> RunSpec:
    """Supervised fine-tuning of a Hugging Face folder on a file of chats, prompts and responses, or texts."""
    return RunSpec(
        name="sft",
        out="out/sft",
        model=HFModel(path="models/my-model"),
        phases=[
            Phase(
                name="sft",
                epochs=1,
                algorithm=SFT(),
                data=[JsonlData(path="data/train.jsonl")],
                optimizers=[AdamWSpec(lr=1e-5, schedule=Schedule(kind="cosine", warmup_steps=10))],
            )
        ],
        checkpoint=Checkpoint(every=100),
    )


def dpo() -> RunSpec:
    """Preferences between two answers, on a Hugging Face folder and a file of prompts with chosen and rejected answers."""
    return RunSpec(
        name="dpo",
        out="out/dpo",
        model=HFModel(path="models/my-model"),
        phases=[
            Phase(
                name="dpo",
                epochs=1,
                algorithm=DPO(),
                data=[JsonlData(path="data/pairs.jsonl")],
                optimizers=[AdamWSpec(lr=1e-6, schedule=Schedule(kind="linear", warmup_steps=10))],
            )
        ],
        checkpoint=Checkpoint(every=100),
    )


def grpo() -> RunSpec:
    """Reinforcement learning of a Hugging Face folder against a reward function."""
    return _rewarded("grpo", GRPO(sampling=_DRAWN, clip_high=0.28, kl_coef=0.01), AdamWSpec(lr=1e-6))


def gspo() -> RunSpec:
    """The same with one ratio a completion, which mixtures of experts take better, and bounds of the size that this needs."""
    return _rewarded("gspo", GSPO(sampling=_DRAWN, minibatches=4), AdamWSpec(lr=1e-6))


def ppo() -> RunSpec:
    """The same with a critic, which says of every token what it was worth; it begins as a copy of the model."""
    algorithm = PPO(sampling=_DRAWN, samples=4, minibatches=4, kl_coef=0.01, critic=Critic(warmup=5))
    return _rewarded("ppo", algorithm, AdamWSpec(lr=1e-6), AdamWSpec(role="critic", lr=5e-6))


def _rewarded(name: str, algorithm: GRPO | GSPO | PPO, *optimizers: AdamWSpec) -> RunSpec:
    reward = FunctionReward(function="areno_fn.world.rewards:contains_answer", name="contains_answer")
    return RunSpec(
        name=name,
        out=f"out/{name}",
        model=HFModel(path="models/my-model"),
        phases=[
            Phase(
                name=name,
                steps=100,
                algorithm=algorithm,
                data=[JsonlData(path="data/train.jsonl")],
                batch=Batch(rows=8),
                optimizers=list(optimizers),
                rewards=[reward],
            )
        ],
        evaluation=Evaluation(
            data=[JsonlData(path="data/heldout.jsonl")],
            rewards=[reward],
            sampling=Sampling(max_tokens=256, temperature=0.0),
            every=20,
            limit=256,
        ),
        checkpoint=Checkpoint(every=20),
    )


STARTERS: dict[str, Callable[[], RunSpec]] = {
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
    "gspo": gspo,
    "ppo": ppo,
    "quickstart": quickstart,
    "flow": flow,
    "pipeline": pipeline,
}
"""Starters by the name that `python -m areno_fn.spec new --kind` takes."""
