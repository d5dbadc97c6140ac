"""The guide to flow matching runs, and names what exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import get_args

from areno_fn.contracts.spec import FlowDPO, FlowSFT, RewardedFlow
from areno_fn.contracts.state import TrainState
from areno_fn.steps import flow

GUIDE = (Path(__file__).parents[2] / "docs/flow.md").read_text(encoding="utf-8")


def test_the_block_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.split("## Two updates")[1], flags=re.DOTALL)
    scope: dict[str, object] = {}
    exec(code, scope)
    state = scope["state"]
    assert isinstance(state, TrainState) and state.counters.optimizer_step == 2


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
