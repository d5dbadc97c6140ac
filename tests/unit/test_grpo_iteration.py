"""The task and the shares of the benchmark of a whole GRPO iteration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.grpo_iteration import HELD_OUT, WARM, brief, shares, write_questions


def test_the_reward_is_half_for_the_right_word_and_half_for_brevity() -> None:
    row = {"question": "What is the capital of Italy?", "answer": "Rome"}
    assert brief(row, "Rome.") == 1.0
    assert brief(row, "Milan") == 0.5
    assert brief(row, "") == 0.0
    assert brief(row, "The capital of Italy is rome.") == pytest.approx(0.5 + 0.5 * 14 / 17)
    assert brief(row, "word " * 40) == 0.0


def test_held_out_countries_are_in_no_question_of_the_training(tmp_path: Path) -> None:
    train, held_out = (
        [json.loads(line) for line in write_questions(tmp_path / f"{held}.jsonl", held).read_text().splitlines()]
        for held in (False, True)
    )
    asked = {row["question"].rstrip("?").split()[-1] for row in train}
    kept = {row["question"].rstrip("?").split()[-1] for row in held_out}
    assert asked and kept and not asked & kept
    assert len(kept) == -(-(len(asked) + len(kept)) // HELD_OUT)


def test_what_no_part_says_of_an_iteration_is_idle() -> None:
    lines = [
        {
            "time": 2.0 * i,
            "time/rollout": 1.0,
            "time/reward": 0.1,
            "time/score": 0.2,
            "time/train": 0.5,
            "rollout/tokens_per_s": 7.0,
        }
        for i in range(WARM + 4)
    ]
    found = shares(lines)
    assert found["iterations"] == 3 and found["seconds"] == pytest.approx(2.0)
    assert [found[name] for name in ("rollout", "reward", "scoring", "training", "idle")] == pytest.approx(
        [0.5, 0.05, 0.1, 0.25, 0.1]
    )
