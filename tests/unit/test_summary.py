"""`summary.json`, from lines written by hand."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e import tiny

from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.summary import summarise, write

SPEC = msgspec.convert(tomllib.loads(tiny.SPEC) | {"seed": 11}, RunSpec)


def log(path: Path, *lines: dict[str, Any]) -> Path:
    file = path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def step(phase: str, seconds: float) -> dict[str, Any]:
    return {"step": 1, "phase": phase, "train/loss": 1.0, "time/step": seconds, "time/rollout": 100.0}


def score(phase: str, value: float | None) -> dict[str, Any]:
    return {"step": 1, "phase": phase, "eval/score": value, "eval/exact_match": 0.0, "time/evaluation": 1.5}


def test_a_phase_is_its_first_and_last_score_and_the_seconds_of_its_steps(tmp_path: Path) -> None:
    lines = [score("sft", 0.1), step("sft", 0.25), score("sft", 0.9), step("sft", 0.5), score("sft", 0.3)]
    lines += [score("grpo", 0.3), step("grpo", 2.0), score("grpo", 0.8)]
    names = {"eval_rewards": ["exact_match", "short"]}
    sft = {"name": "sft", "algorithm": "sft", "steps": 2, "seconds": 0.75, "eval_seconds": 4.5, **names}
    grpo = {"name": "grpo", "algorithm": "grpo", "steps": 1, "seconds": 2.0, "eval_seconds": 3.0, **names}
    assert summarise(SPEC, log(tmp_path, *lines), ("exact_match", "short")) == {
        "seed": 11,
        "phases": [{**sft, "eval_start": 0.1, "eval_end": 0.3}, {**grpo, "eval_start": 0.3, "eval_end": 0.8}],
    }


@pytest.mark.parametrize(
    ("scores", "start", "end"), [([], None, None), ([0.5], 0.5, None), ([0.5, 0.5], 0.5, 0.5), ([None, 1.0], None, 1.0)]
)
def test_scores_that_are_missing_or_not_finite_are_null(
    scores: list[float | None], start: float | None, end: float | None, tmp_path: Path
) -> None:
    lines = [step("sft", 1.0), *(score("sft", value) for value in scores)]
    (phase,) = summarise(SPEC, log(tmp_path, *lines))["phases"]
    assert (phase["eval_start"], phase["eval_end"]) == (start, end)


def test_a_phase_that_has_not_begun_is_not_there(tmp_path: Path) -> None:
    assert [phase["name"] for phase in summarise(SPEC, log(tmp_path, step("sft", 1.0)))["phases"]] == ["sft"]
    assert summarise(SPEC, log(tmp_path))["phases"] == []


def test_the_file_holds_what_is_returned(tmp_path: Path) -> None:
    made = write(SPEC, log(tmp_path, step("sft", 1.0)), tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]
