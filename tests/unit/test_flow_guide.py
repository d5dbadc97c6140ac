"""The guide to flow matching runs, and names what exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import get_args

import pytest

import areno_fn as af
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    Denoising,
    FlowDMD2,
    FlowDPO,
    FlowGRPO,
    FlowSFT,
    NoisyDenoising,
    RewardedFlow,
)
from areno_fn.contracts.state import TrainState
from areno_fn.engine.plan import Plan
from areno_fn.steps import flow

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/flow.md").read_text(encoding="utf-8")


def test_the_block_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.split("## Two updates")[1], flags=re.DOTALL)
    scope: dict[str, object] = {}
    exec(code, scope)
    state = scope["state"]
    assert isinstance(state, TrainState) and state.counters.optimizer_step == 2


HEAD = """
name = "guide"
out = "out"
model = { kind = "scratch", family = "digits_dit", config = { sample_size = 8, in_channels = 1 } }
"""
EVALUATED = """
[evaluation]
data = [{ kind = "digits", split = "heldout" }]
rewards = [{ kind = "function", function = "areno_fn.world.picture_rewards:contrast" }]
"""
TOML = {
    re.search(r'(?m)^name = "(\w+)"', block)[1]: block for block in re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
}  # type: ignore[index]


def planned(folder: Path, text: str) -> Plan:
    (folder / "guide.toml").write_text(text, encoding="utf-8")
    return af.plan(af.read_spec(str(folder / "guide.toml")))


def test_the_run_that_the_guide_shows_is_planned(tmp_path: Path) -> None:
    block = next(block for block in re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL) if "Legible" in block)
    made = planned(tmp_path, 'name = "guide"\nout = "out"\n' + block)
    (phase,) = made.phases
    assert phase.spec.algorithm == FlowGRPO(samples=8, denoising=NoisyDenoising(steps=8, level=0.7))
    assert made.evaluation is not None and made.evaluation.sampling == Denoising(steps=20)


def test_the_generator_that_the_guide_shows_is_planned_where_there_is_an_evaluation(tmp_path: Path) -> None:
    (phase,) = planned(tmp_path, HEAD + TOML["dmd2"] + EVALUATED).phases
    assert isinstance(phase.spec.algorithm, FlowDMD2) and phase.spec.denoising == Denoising(steps=4)
    with pytest.raises(SpecError, match=r"^phases\.dmd2\.denoising: it is how evaluations draw, and there is none"):
        planned(tmp_path, HEAD + TOML["dmd2"])


def test_the_chain_that_the_guide_shows_is_planned_and_that_of_the_specification(tmp_path: Path) -> None:
    found = planned(tmp_path, HEAD + TOML["sft"]).phases
    shipped = af.read_spec(str(ROOT / "specs/flow_distill.toml")).phases
    assert [phase.spec.algorithm for phase in found] == [phase.algorithm for phase in shipped]
    assert [(phase.steps, phase.spec.batch) for phase in found] == [(phase.steps, phase.batch) for phase in shipped]
    with pytest.raises(
        SpecError, match=r"^phases\.distill\.algorithm\.teacher_guidance: nothing has taught digits_dit"
    ):
        planned(tmp_path, HEAD + TOML["sft"].replace(", condition_dropout = 0.1", ""))


def test_every_algorithm_is_in_a_table() -> None:
    kinds = {str(kind.__struct_config__.tag) for kind in (FlowSFT, FlowDPO, *get_args(RewardedFlow))}
    assert kinds <= set(re.findall(r"^\| `(flow_[a-z_0-9]+)`", GUIDE, flags=re.MULTILINE))


def test_every_loss_is_in_the_table_and_every_stage_exists() -> None:
    modules = [m.name for m in pkgutil.walk_packages(flow.__path__, "areno_fn.steps.flow.")]
    found = {name for module in modules for name in vars(importlib.import_module(module))}
    rows = [line for line in GUIDE.split("## What a loss is given")[1].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)", row)}
    assert named <= found | {"clipped"}
    stages = {"velocity_matching", "diffusion_dpo", "diffusion_nft", "advantage_weighted", "group_preference", "dmd2"}
    stages |= {
        "centred_reward",
        "flow_grpo",
        "grpo_guard",
        "dppo",
        "distilled",
        "trajectory_matching",
        "rewarded_matching",
    }
    assert stages <= named
