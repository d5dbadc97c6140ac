"""Runs with rewards of every form and data of several sorts, as a user would start them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny

import areno_fn as af
from areno_fn.engine.text_medium import pad_prompts
from areno_fn.world import rewards as rewards_module

ROWS = [{"ask": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
SOURCES = [
    {"kind": "jsonl", "path": "easy.jsonl", "name": "easy", "columns": {"prompt": "ask"}, "limit": 4, "weight": 1.0},
    {"kind": "hf", "path": "hard", "name": "hard", "columns": {"prompt": "ask"}, "weight": 1.0},
]
SHORT = {"phases__sft__steps": 1, "phases__grpo__steps": 4, "checkpoint__every": 1}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with data; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "easy.jsonl").write_text(lines)
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / "train.jsonl").write_text(lines)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def start(home: Path, *flags: str, rewards: list[dict[str, Any]], **values: Any) -> tiny.Done:
    spec = tiny.write_spec(home)
    return tiny.run(spec, Path("out"), *flags, phases__grpo__rewards=rewards, **(SHORT | values))


JUDGES = """
import asyncio, os

SEEN = []

def group(row, completions):
    SEEN.append((row["answer"], len(completions)))
    most = max(len(text) for text in completions)
    return [float(len(text) == most) for text in completions]

async def right(row, completion):
    await asyncio.sleep(0)
    return float(completion.strip() == row["answer"])

def wander(row, completion):
    os.chdir("elsewhere")
    return float(len(completion))

def sometimes(row, completion):
    if os.path.exists("hang"):
        asyncio.run(asyncio.sleep(600))
    return float(len(completion) % 3)
"""


def test_rewards_of_every_form_judge_the_data_sets_they_are_for(home: Path) -> None:
    (home / "form_rewards.py").write_text(JUDGES)
    rewards = [
        {"function": "form_rewards:group", "weight": 0.5},
        {"function": "form_rewards:right", "data": ["hard"], "concurrency": 2, "timeout": 60},
        {"function": "areno_fn.world.rewards:length_penalty", "name": "short", "data": ["easy"]},
    ]
    judged = {"function": "form_rewards:group", "name": "held_out"}
    done = start(home, rewards=rewards, phases__grpo__data=SOURCES, evaluation__rewards=[judged])
    assert (done.code, done.err) == (0, "")
    seen = sys.modules["form_rewards"].SEEN
    assert {count for _, count in seen} == {4, 1}, "groups of 4 in training, single completions in an evaluation"
    steps = [
        line for line in tiny.lines(home / "out/metrics.jsonl") if "train/loss" in line and line["phase"] == "grpo"
    ]
    assert len(steps) == 4
    assert all("reward/group" in line for line in steps)
    assert any("reward/right" in line for line in steps) and any("reward/short" in line for line in steps)
    evaluations = [line for line in tiny.lines(home / "out/metrics.jsonl") if "eval/score" in line]
    assert all(line["eval/held_out"] == line["eval/score"] == 1.0 for line in evaluations)


def test_a_reward_that_wanders_off_leaves_a_run_with_relative_paths_alone(home: Path) -> None:
    (home / "elsewhere").mkdir()
    (home / "wandering_rewards.py").write_text(JUDGES)
    done = start(home, rewards=[{"function": "wandering_rewards:wander"}])
    assert (done.code, done.err) == (0, "")
    assert list((home / "elsewhere").iterdir()) == []
    assert {path.name for path in (home / "out").iterdir()} >= {"checkpoints", "export", "summary.json", "curves.png"}
    assert len(list((home / "out" / "checkpoints").glob("*"))) >= 2


def test_a_reward_that_hangs_leaves_a_run_that_goes_on_bit_for_bit(home: Path) -> None:
    (home / "hanging_rewards.py").write_text(JUDGES)
    rewards = [{"function": "hanging_rewards:sometimes", "timeout": 0.5}]
    whole = start(home, rewards=rewards)
    assert (whole.code, whole.err) == (0, "")
    (home / "out").rename(home / "whole")
    assert start(home, rewards=rewards, phases__grpo__steps=2).code == 0
    (home / "hang").touch()
    hung = start(home, "--resume", rewards=rewards)
    assert hung.code == 2
    assert hung.err.startswith(
        "error: the reward 'sometimes' gave no answer on row 0 (arithmetic(1 digits, train, seed 0):"
    )
    assert "within its timeout of 0.5 s; raise `timeout`" in hung.err
    assert hung.err.count("\n") == 1
    (home / "hang").unlink()
    resumed = start(home, "--resume", rewards=rewards)
    assert (resumed.code, resumed.err) == (0, "")
    assert tiny.state(home / "out") == tiny.state(home / "whole")


def test_a_mixture_stopped_and_continued_is_the_uninterrupted_one(home: Path) -> None:
    (home / "mixed_rewards.py").write_text(JUDGES)
    given = {"rewards": [{"function": "mixed_rewards:group"}], "phases__grpo__data": SOURCES, "evaluation": None}
    assert start(home, **given).code == 0
    (home / "out").rename(home / "whole")
    assert start(home, **given, phases__grpo__steps=1).code == 0
    assert start(home, "--resume", **given).code == 0
    assert tiny.state(home / "out") == tiny.state(home / "whole")


def test_another_mixture_is_another_run(home: Path) -> None:
    (home / "other_rewards.py").write_text(JUDGES)
    rewards = [{"function": "other_rewards:group"}]
    assert start(home, rewards=rewards, phases__grpo__data=SOURCES, phases__grpo__steps=1).code == 0
    heavier = [SOURCES[0] | {"weight": 3.0}, SOURCES[1]]
    done = start(home, "--resume", rewards=rewards, phases__grpo__data=heavier)
    assert done.code == 2
    assert "phases.grpo.data.0.weight was 1.0 and is now 3.0" in done.err
    assert start(home, "--resume", "--accept", "data", rewards=rewards, phases__grpo__data=heavier).code == 0


def test_a_class_of_training_and_evaluation_is_made_once(home: Path) -> None:
    (home / "class_rewards.py").write_text(
        "class Model:\n    def __call__(self, row, completion):\n        return 1.0\n"
    )
    reward = {"function": "class_rewards:Model"}
    changes = [f"phases.grpo.rewards={json.dumps([reward])}", f"evaluation.rewards={json.dumps([reward])}"]
    plan = af.plan(af.read_spec(str(tiny.write_spec(home)), changes))
    assert plan.evaluation is not None
    assert plan.evaluation.rewards[0].function is plan.phases[1].rewards[0].function


def test_without_feedback_there_is_no_stage_that_judges(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands in for the rewards of a supervised phase: nothing is asked, and no zeros are recorded."""
    asked: list[int] = []

    def score(rewards: Any, rows: Any, *rest: Any) -> Any:
        asked.append(len(rows))
        return rewards_module.score(rewards, rows, *rest)

    monkeypatch.setattr("areno_fn.engine.loop.score", score)
    done = start(
        home, rewards=[{"function": "areno_fn.world.rewards:exact_match"}], phases__sft__steps=3, evaluation=None
    )
    assert (done.code, done.err) == (0, "")
    assert asked == [16] * 4, "four iterations of the phase that generates"
    for line in tiny.lines(home / "out/metrics.jsonl"):
        judged = {name for name in line if "reward" in name or name.startswith("rollout/")}
        assert bool(judged) == (line["phase"] == "grpo"), judged
    plan = af.plan(af.read_spec(str(tiny.write_spec(home)), ["phases.sft.steps=1"]))
    assert plan.phases[0].rewards == () and plan.phases[0].algorithm.sample is None


def test_a_dry_run_asks_every_reward_once(home: Path) -> None:
    (home / "asked_rewards.py").write_text(JUDGES + "def broken(row, completion):\n    return row['answers']\n")
    rewards = [{"function": "asked_rewards:group"}, {"function": "asked_rewards:right", "data": ["hard"]}]
    done = start(home, "--dry-run", rewards=rewards, phases__grpo__data=SOURCES)
    assert (done.code, done.err) == (0, "")
    assert "    group: 0 for no text, 1 for the answer\n    right: 0 for no text, 1 for the answer\n" in done.out
    assert sys.modules["asked_rewards"].SEEN == [("1", 2), ("1", 2)], "the first row of each data set"
    refused = start(home, "--dry-run", rewards=[{"function": "asked_rewards:broken"}], phases__grpo__data=SOURCES)
    assert refused.code == 2
    assert refused.err == (
        "error: phases.grpo.rewards: the reward 'broken' failed on row 0 (easy.jsonl:1): KeyError: 'answers'; "
        "the row has answer, prompt\n"
    )
    assert not (home / "out").exists()


def judged(**fields: Any) -> dict[str, Any]:
    return {"rewards": [{"function": "areno_fn.world.rewards:exact_match"} | fields]}


def read(easy: dict[str, Any], hard: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"phases__grpo__data": [SOURCES[0] | easy, SOURCES[1] | (hard or {})]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            judged(data=["esy"]),
            "rewards.0.data: there is no data set 'esy' in phases.grpo.data; those there are called easy, hard",
        ),
        (judged(data=["easy"]), "none of them judges the data set 'hard', so all its samples would be worth 0"),
        (judged(concurrency=4), "is called one time after the other, so `concurrency` says nothing"),
        (read({}, {"weight": 0.0}), "phases.grpo.data.1.weight: the other data sets have weights"),
        (read({}, {"name": "easy"}), "phases.grpo.data: two data sets are named 'easy'"),
        (read({"name": "1"}), "phases.grpo.data.0.name: '1' is the place of another"),
        (read({"weight": 1e-3}), "data set 0: its weight of 0.001 among 1.001 gives it none of the 10 places"),
        (read({"columns": {"prompt": "q"}}), "phases.grpo.data: easy.jsonl:1: there is no 'q' for `columns` to rename"),
        (read({}, {"split": "test"}), "phases.grpo.data: the data folder hard has no split 'test'"),
        ({"evaluation__data": SOURCES[:1]}, "evaluation.data.0.weight: an evaluation reads every row once"),
    ],
)
def test_S7_specifications_that_cannot_be_meant(home: Path, values: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {
        "phases__grpo__data": SOURCES,
        "rewards": [{"function": "areno_fn.world.rewards:exact_match"}],
    }
    done = start(home, **(usual | values))
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1
    assert not (home / "out").exists()


def test_a_row_that_is_twice_in_a_batch_is_continued_differently() -> None:
    prompts = pad_prompts([[1], [2, 3], [4]], [2, 0, 2, 2], torch.device("cpu"))
    assert prompts.ids.tolist() == [2, 0, 5, 8]
    assert prompts.tokens.tolist() == [[4], [1], [4], [4]]
