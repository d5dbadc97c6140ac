"""What a plan of a flow model refuses, or bears, though no rule between two fields says so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import AlgorithmSpec, Phase, RunSpec
from areno_fn.engine.plan import plan

CONFIG = {
    "num_embeds_ada_norm": 10, "sample_size": 8, "in_channels": 1, "out_channels": 1, "patch_size": 4,
    "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8,
}  # fmt: skip


def spec(denoising: dict[str, Any], **run: Any) -> RunSpec:
    phase = {
        "name": "p",
        "steps": 1,
        "algorithm": {"kind": "flow_grpo", "samples": 2, "denoising": denoising},
        "data": [{"kind": "digits", "limit": 4}],
        "rewards": [{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}],
        "batch": {"rows": 1},
    }
    model = {"kind": "scratch", "family": "digits_dit", "config": CONFIG}
    return msgspec.convert({"out": "out", "device": "cpu", "model": model, "phases": [phase], **run}, RunSpec)


def test_steps_are_bounded_and_chosen_among_those_there_are() -> None:
    """A plan builds the levels of all steps: without a bound they fill any memory."""
    for kind in ("flow_grpo", "flow_nft", "flow_tdm", "flow_distill"):
        with pytest.raises(msgspec.ValidationError, match="<= 1000"):
            msgspec.convert({"kind": kind, "denoising": {"steps": 1001}}, AlgorithmSpec)
    with pytest.raises(SpecError, match="5 noisy steps cannot be chosen among 3"):
        plan(spec({"steps": 4, "count": 5}))


def test_adapters_that_would_have_no_gradient_are_refused() -> None:
    with pytest.raises(SpecError, match="finetune: the output of digits_dit from scratch is 0, .*; train it whole"):
        plan(spec({"steps": 4}, finetune={"kind": "lora"}))
    assert plan(spec({"steps": 4}, finetune={"kind": "lora", "targets": ["proj_out_2"]})).phases


def matched(kind: str, **fields: Any) -> RunSpec:
    """A generator of three steps by another scale of noise levels, the first of which ends at 2/3."""
    asked = spec({"steps": 3}, model={"kind": "scratch", "family": "digits_dit", "config": CONFIG})
    roles = ("actor", "fake", "surrogate") if kind == "flow_tdm_r1" else ("actor", "fake")
    phase = {
        "name": "p",
        "steps": 1,
        "algorithm": {"kind": kind, "denoising": {"steps": 3, "shift": 1.0}} | fields,
        "data": [{"kind": "digits", "limit": 4}],
        "rewards": msgspec.to_builtins(asked.phases[0].rewards) if kind == "flow_tdm_r1" else [],
        "optimizers": [{"kind": "adamw", "role": role} for role in roles],
    }
    return msgspec.structs.replace(asked, phases=msgspec.convert([phase], type=list[Phase]))


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (
            "flow_tdm",
            {"high": 0.6},
            r"phases.p: algorithm.high: the first of 3 steps ends at 0.6667, .* from 0.6667 to",
        ),
        ("flow_tdm_r1", {"high": 0.67}, "algorithm.high: .* has levels from 0.6733 to high = 0.67, which are none"),
        ("flow_tdm_r1", {"high": 0.6, "query": "interval"}, "algorithm.high: the first of 3 steps ends at 0.6667"),
        ("flow_tdm", {"low": 0.1}, "phases.p.algorithm.low: levels begin where a step ends"),
        ("flow_tdm", {"high": 0.9, "query": "interval"}, "phases.p.algorithm.high: with query = 'interval' levels end"),
    ],
)
def test_levels_above_the_end_of_a_step_are_there(kind: str, fields: dict[str, Any], words: str) -> None:
    """Where there were none, the surrogate's loss was not a number, and the generator's levels lay below its states."""
    with pytest.raises(SpecError, match=words):
        plan(matched(kind, **fields))


@pytest.mark.parametrize("fields", [{"high": 0.7}, {"query": "interval"}])
def test_levels_that_leave_room_are_planned(fields: dict[str, Any]) -> None:
    for kind in ("flow_tdm", "flow_tdm_r1"):
        assert plan(matched(kind, teacher_guidance=1.0, **fields)).phases
