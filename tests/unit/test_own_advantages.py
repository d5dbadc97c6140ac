"""Advantages of one's own in the place of an algorithm's: the same run where they say the same, and refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typeguard import suppress_type_checks

import areno_fn as af
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.ckpt.resume import latest
from areno_fn.contracts.errors import RecordError, RewardError, SpecError
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.spec import FlowGRPO
from areno_fn.engine.specfile import STARTERS, write
from areno_fn.steps.advantages import compared
from areno_fn.steps.recipes.flow_groups import advantages_of

ROOT = Path(__file__).parents[2]
SMALL = [
    "device=cpu",
    "phases.sft.data.0.count=16",
    "phases.grpo.data.0.count=16",
    "evaluation.data.0.count=4",
    "phases.sft.steps=1",
    "phases.sft.stop_at=0",
    "phases.sft.batch.rows=4",
    "phases.grpo.steps=2",
    "phases.grpo.batch.rows=2",
    "evaluation.limit=2",
    "log.tensorboard=false",
    "log.samples=0",
]


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """A reward less the mean of the others of its group, written with loops."""
    found = torch.zeros(len(rewards))
    for i, group in enumerate(groups.tolist()):
        others = [float(rewards[j]) for j in range(len(rewards)) if int(groups[j]) == group and j != i]
        found[i] = float(rewards[i]) - sum(others) / len(others)
    return found


REWARD = """
def spread(rows, completions):
    return [len(set(text)) / 4 for text in completions]
"""


def spec(tmp_path: Path, name: str, *changes: str) -> af.RunSpec:
    return af.read_spec(ROOT / "specs/quickstart.toml", [*SMALL, f"out={tmp_path / name}", *changes])


def figures(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time") and "_per_s" not in k} for line in lines]


def test_a_function_that_says_what_the_algorithm_says_makes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_lengths.py").write_text(REWARD)
    reward = "phases.grpo.rewards.0.function=own_lengths:spread"
    named = ["phases.grpo.algorithm.baseline=leave_one_out", "phases.grpo.algorithm.scale=none"]
    assert af.train(spec(tmp_path, "named", reward, *named)) == 0
    assert af.train(spec(tmp_path, "own", reward), advantages={"grpo": rloo}) == 0
    assert af.train(spec(tmp_path, "plain", reward)) == 0
    by_name, by_own, plain = (figures(tmp_path / name) for name in ("named", "own", "plain"))
    for one, other in zip(by_name, by_own, strict=True):
        assert one.keys() == other.keys()
        assert {k: v for k, v in one.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in other.items() if isinstance(v, float)}, rel=1e-4, abs=1e-6
        )
    last = [run[-2] if "train/loss" in run[-2] else run[-1] for run in (by_own, plain)]
    assert last[0] != last[1]


def test_a_run_with_advantages_of_ones_own_is_another_run(tmp_path: Path) -> None:
    plain, own = af.plan(spec(tmp_path, "a")), af.plan(spec(tmp_path, "a"), advantages={"grpo": rloo})
    assert plain.identity.phases != own.identity.phases and own.own == ("advantages",)
    assert af.plan(spec(tmp_path, "a"), advantages={}).identity == plain.identity


def test_what_is_given_is_a_copy_and_what_is_returned_carries_no_gradient() -> None:
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, 4.0]), torch.tensor([0, 0, 1, 1])
    before = rewards.clone(), groups.clone()

    def spoiling(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        groups.zero_()
        return rewards.mul_(2).double().requires_grad_()

    found = compared(spoiling, rewards, groups, baseline="group", scale="group")
    assert torch.equal(rewards, before[0]) and torch.equal(groups, before[1])
    assert found.tolist() == [2.0, 4.0, 8.0, 8.0] and found.dtype == torch.float32 and not found.requires_grad
    plain = compared(None, rewards, groups, baseline="group", scale="none")
    assert plain.tolist() == [-0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda r, g: None, RecordError, r"are None; it must return a floating tensor \[4\]"),
        (lambda r, g: r.tolist(), RecordError, r"it must return a floating tensor \[4\], one for each reward"),
        (lambda r, g: r[:2], RecordError, r"it must return a floating tensor \[4\]"),
        (lambda r, g: r[:, None], RecordError, r"it must return a floating tensor \[4\]"),
        (lambda r, g: g, RecordError, r"it must return a floating tensor \[4\]"),
        (lambda r, g: r / 0, RewardError, "<lambda> gave row 0 the advantage inf; it must be finite"),
    ],
)
def test_what_is_no_advantage_is_refused(given: Callable[..., Any], error: type[Exception], words: str) -> None:
    with suppress_type_checks(), pytest.raises(error, match=words):
        compared(given, torch.ones(4), torch.tensor([0, 0, 1, 1]), baseline="group", scale="group")


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        (
            {"sft": rloo},
            [],
            "phases.sft.algorithm: sft compares no samples of a prompt, and advantages of your own have no place",
        ),
        (
            {"grpo": 3},
            [],
            r"phases.grpo.algorithm: its advantages are 3; give a function \(rewards \[B\], groups \[B\]\) -> \[B\]",
        ),
        (
            {"grpo": lambda rewards: rewards},
            [],
            r"phases.grpo.algorithm: its advantages are the function <lambda>; give a function \(rewards \[B\], groups \[B\]\)",
        ),
        ({"grpo": torch.nn.ReLU}, [], "phases.grpo.algorithm: its advantages are the class ReLU; give a function"),
        (rloo, [], "advantages come by phase, advantages={'sft': ...}, received the function rloo"),
        ({"grp": rloo}, [], "advantages: there is no phase 'grp'; the phases are sft, grpo"),
        ({"grpo": None}, [], "advantages: what replaces those of the phase grpo is None; leave the phase out"),
        (
            {"grpo": rloo},
            ["phases.grpo.algorithm.baseline=leave_one_out", "phases.grpo.algorithm.scale=none"],
            "phases.grpo.algorithm.baseline: it belongs to the algorithm's own advantages, and a function of your own stands",
        ),
    ],
)
def test_advantages_that_have_no_place_are_refused(given: Any, changes: list[str], words: str, tmp_path: Path) -> None:
    with suppress_type_checks(), pytest.raises(SpecError, match=words):
        af.plan(spec(tmp_path, "a", *changes), advantages=given)


def test_algorithms_of_pictures_take_them_too(tmp_path: Path) -> None:
    write(STARTERS["flow"](), tmp_path / "flow.toml")
    made = af.plan(af.read_spec(tmp_path / "flow.toml", ["device=cpu"]), advantages={"grpo": rloo})
    assert made.own == ("advantages",)
    with pytest.raises(SpecError, match="phases.grpo.algorithm.combine: it belongs to the algorithm's own advantages"):
        each = ["device=cpu", "phases.grpo.algorithm.combine=each"]
        af.plan(af.read_spec(tmp_path / "flow.toml", each), advantages={"grpo": rloo})
    rewards, groups = torch.tensor([0.0, 8.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])

    class Judged:
        def __init__(self) -> None:
            self.rewards, self.each = rewards, None
            self.rollout = type("Drawn", (), {"groups": groups})()

    with suppress_type_checks():
        batch: JudgedTrajectory = Judged()  # type: ignore[assignment]
        assert advantages_of(FlowGRPO(), batch, rloo).tolist() == [-5.0, 5.0, -1.0, 1.0]


def test_advantages_that_fail_cost_no_step_that_was_made(tmp_path: Path) -> None:
    asked = spec(tmp_path, "out", "checkpoint.every=0")
    calls: list[int] = []

    def failing(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return rloo(rewards, groups) * (torch.nan if len(calls) == 2 else 1.0)

    with pytest.raises(RewardError, match="failing gave row 0 the advantage nan"):
        af.train(asked, advantages={"grpo": failing})
    kept = latest(tmp_path / "out/checkpoints")
    assert kept is not None and read_manifest(kept).step == asked.phases[0].steps + 1
    assert af.train(asked, advantages={"grpo": rloo}, resume=True, accept=["phases"]) == 0
