"""Specifications of flow models to start from."""

from __future__ import annotations

from areno_fn.contracts.spec import (
    AdamWSpec,
    Batch,
    Checkpoint,
    Denoising,
    DigitsData,
    Evaluation,
    FlowGRPO,
    FlowSFT,
    FunctionReward,
    HFModel,
    JsonlData,
    Log,
    Lora,
    NoisyDenoising,
    Phase,
    PipelineSpec,
    RunSpec,
    Schedule,
    ScratchModel,
)

_LEGIBLE = FunctionReward(function="areno_fn.engine.digit_reward:Legible", name="legible")
_CONTRAST = FunctionReward(function="areno_fn.world.picture_rewards:contrast", name="contrast")


def flow() -> RunSpec:
    """A small model that learns to draw digits from nothing: a short supervised phase, then rewards."""
    digits = DigitsData()
    return RunSpec(
        name="flow",
        out="out/flow",
        model=ScratchModel(
            family="digits_dit",
            config={
                "num_embeds_ada_norm": 10,
                "sample_size": 8,
                "in_channels": 1,
                "out_channels": 1,
                "patch_size": 2,
                "num_layers": 4,
                "num_attention_heads": 4,
                "attention_head_dim": 24,
            },
        ),
        phases=[
            Phase(
                name="sft",
                steps=500,
                stop_at=0.5,
                algorithm=FlowSFT(),
                data=[digits],
                batch=Batch(rows=64),
                optimizers=[_adamw(2e-3, 20)],
            ),
            Phase(
                name="grpo",
                steps=50,
                stop_at=0.9,
                algorithm=FlowGRPO(
                    minibatches=2,
                    clip_low=1e-3,
                    clip_high=1e-3,
                    kl_coef=0.02,
                    denoising=NoisyDenoising(steps=8, level=0.7),
                ),
                data=[digits],
                batch=Batch(rows=24),
                optimizers=[_adamw(3e-4, 5)],
                rewards=[_LEGIBLE],
            ),
        ],
        evaluation=Evaluation(
            data=[DigitsData(split="heldout")], rewards=[_LEGIBLE], denoising=Denoising(steps=20), every=25
        ),
        checkpoint=Checkpoint(every=25, keep=2),
        log=Log(samples=0),
    )


def _adamw(lr: float, warmup: int) -> AdamWSpec:
    return AdamWSpec(lr=lr, betas=(0.9, 0.99), weight_decay=0.0, schedule=Schedule(warmup_steps=warmup))


def pipeline() -> RunSpec:
    """Adapters of a pipeline of diffusers: demonstrations first, then Flow-GRPO against a reward function."""
    adamw = AdamWSpec(lr=1e-4, weight_decay=0.0, schedule=Schedule(warmup_steps=10))
    return RunSpec(
        name="pipeline",
        out="out/pipeline",
        model=HFModel(
            path="models/my-pipeline",
            dtype="bfloat16",
            pipeline=PipelineSpec(height=512, width=512, dtype="bfloat16"),
        ),
        finetune=Lora(rank=32, alpha=64),
        phases=[
            Phase(
                name="sft",
                epochs=1,
                algorithm=FlowSFT(),
                data=[JsonlData(path="data/pictures.jsonl")],
                batch=Batch(rows=8, micro_rows=1),
                optimizers=[adamw],
            ),
            Phase(
                name="grpo",
                steps=100,
                algorithm=FlowGRPO(kl_coef=0.01, denoising=NoisyDenoising(steps=10, guidance=4.5)),
                data=[JsonlData(path="data/prompts.jsonl")],
                batch=Batch(rows=8, micro_rows=8),
                optimizers=[adamw],
                rewards=[_CONTRAST],
            ),
        ],
        evaluation=Evaluation(
            data=[JsonlData(path="data/heldout.jsonl")],
            rewards=[_CONTRAST],
            denoising=Denoising(steps=28, guidance=4.5),
            every=10,
            limit=64,
            batch=8,
        ),
        checkpoint=Checkpoint(every=10),
        log=Log(samples=0),
    )
