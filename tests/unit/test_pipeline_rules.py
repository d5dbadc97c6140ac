"""What a specification may not ask of a pipeline, by its contract."""

from __future__ import annotations

import msgspec
import pytest

from areno_fn.contracts.components import Component
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.pipeline_io import Output, PipelineIOContract
from areno_fn.contracts.spec import (
    ByteTokenizer,
    ClipReward,
    FlowGRPO,
    FunctionReward,
    HFModel,
    HttpReward,
    JsonlData,
    ModelReward,
    Phase,
    RewardSpec,
    RunSpec,
    SGDSpec,
)
from areno_fn.engine.media import check_medium
from areno_fn.engine.pipeline_rules import check_pipeline


def contract(*outputs: Output) -> PipelineIOContract:
    return PipelineIOContract(
        family="made_up",
        outputs=outputs,
        geometry=Geometry(multiple=8, default=Size(height=8, width=8)),
        components=(Component(name="transformer", trained=True), Component(name="vae")),
        preparer=(),
        codec=("vae",),
        objectives=(),
    )


def asked(*rewards: RewardSpec) -> RunSpec:
    phase = Phase(
        name="grpo",
        algorithm=FlowGRPO(),
        steps=1,
        data=[JsonlData(path="rows.jsonl")],
        rewards=list(rewards),
        optimizers=[SGDSpec()],
    )
    return RunSpec(version=1, name="x", model=HFModel(path="folder"), phases=[phase])


JUDGES: tuple[RewardSpec, ...] = (
    ClipReward(path="clip"),
    FunctionReward(function="rewards:score"),
    HttpReward(url="http://judge"),
)


def test_judges_of_single_pictures_are_asked_about_no_videos() -> None:
    check_pipeline(asked(*JUDGES), contract(Output(type="image")))
    with pytest.raises(SpecError) as refused:
        check_pipeline(asked(*JUDGES), contract(Output(type="video", rate=16), Output(type="audio", rate=8000)))
    right = "judges single pictures, but made_up makes videos; use kind 'function' with a function of (rows, pictures)"
    assert str(refused.value).splitlines() == [
        f"phases.grpo.rewards.0: a reward of kind 'clip' {right}",
        f"phases.grpo.rewards.2: a reward of kind 'http' {right}",
    ]


def test_a_model_of_videos_is_said_to_make_videos() -> None:
    spec = msgspec.structs.replace(asked(ModelReward(path="judge")), tokenizer=ByteTokenizer())
    with pytest.raises(SpecError) as refused:
        check_medium(spec, "made_up", "pictures", prompted=True, videos=True)
    assert str(refused.value).splitlines() == [
        "phases.grpo.rewards.0: a reward of kind 'model' judges text, but made_up makes videos; use kind 'function' with a "
        "function of (rows, pictures)",
        "tokenizer: made_up makes videos and has no tokens; remove this",
    ]
