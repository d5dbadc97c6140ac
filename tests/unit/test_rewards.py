from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno_fn.contracts.errors import RewardError
from areno_fn.contracts.spec import FunctionReward
from areno_fn.world.data_row import Row
from areno_fn.world.rewards import Reward, contains_answer, exact_match, length_penalty, load, load_all, score

ROWS = [Row({"prompt": f"{i}+1=", "answer": str(i + 1), "tags": ["x"]}, "sums.jsonl", i + 1) for i in range(3)]
TEXTS = ["1", " 2\n", "four"]


def reward(function: Callable[..., Any], weight: float = 1.0, name: str = "judge") -> Reward:
    return Reward(name=name, weight=weight, function=function)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_built_in_rewards() -> None:
    assert exact_match(ROWS, TEXTS) == [1.0, 1.0, 0.0]
    assert contains_answer(ROWS, ["it is 1", "it is 3", "3"]) == [1.0, 0.0, 1.0]
    assert length_penalty(ROWS, TEXTS) == [-1.0, -3.0, -4.0]
    assert exact_match([{"answer": 46}], ["46"]) == [1.0]


def test_score_weighs_and_keeps_the_parts() -> None:
    rewards = load_all(
        [
            FunctionReward(function="areno_fn.world.rewards:exact_match", weight=2.0),
            FunctionReward(function="areno_fn.world.rewards:length_penalty", weight=0.25, name="short"),
        ]
    )
    totals, parts = score(rewards, ROWS, TEXTS)
    assert parts == {"exact_match": [1.0, 1.0, 0.0], "short": [-1.0, -3.0, -4.0]}
    assert totals == [1.75, 1.25, -1.0]


def test_one_function_is_loaded_once() -> None:
    spec = FunctionReward(function="areno_fn.world.rewards:exact_match")
    assert load(spec).function is load(spec).function is exact_match


def test_two_rewards_of_one_name() -> None:
    spec = FunctionReward(function="areno_fn.world.rewards:exact_match")
    with pytest.raises(RewardError, match="two rewards are called 'exact_match'"):
        load_all([spec, spec])


def test_a_module_of_the_current_directory(project: Path) -> None:
    (project / "mine_rewards").mkdir()
    (project / "mine_rewards" / "judges.py").write_text(
        "from . import marks\ndef judge(rows, completions):\n    return [marks.FULL for _ in rows]\n"
    )
    (project / "mine_rewards" / "marks.py").write_text("FULL = 0.5\n")
    found = load(FunctionReward(function="mine_rewards.judges:judge", weight=2.0))
    assert (found.name, found.weight) == ("judge", 2.0)
    assert score([found], ROWS, TEXTS)[0] == [1.0, 1.0, 1.0]


def other_folder(project: Path, name: str) -> Path:
    """A folder beside the current one that holds a module of the same name as one of the current folder."""
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{name}.py").write_text("def judge(row, completion):\n    return 2.0\n")
    (project / f"{name}.py").write_text("def judge(row, completion):\n    return 1.0\n")
    return elsewhere


@pytest.mark.parametrize("last", [False, True])
def test_the_current_folder_comes_first_wherever_it_stands_on_the_path(project: Path, last: bool) -> None:
    elsewhere = other_folder(project, "placed_rewards")
    sys.path[:0] = [str(elsewhere)]
    sys.path[:] = [*sys.path, str(project)] if last else sys.path
    found = load(FunctionReward(function="placed_rewards:judge"))
    assert score([found], ROWS, TEXTS)[0] == [1.0, 1.0, 1.0]
    assert (sys.path[0], sys.path.count(str(project))) == (str(project), 1)


def test_a_module_that_was_imported_from_elsewhere_is_not_taken_for_that_of_the_current_folder(project: Path) -> None:
    elsewhere = other_folder(project, "known_rewards")
    sys.path[:0] = [str(elsewhere)]
    importlib.import_module("known_rewards")
    with pytest.raises(RewardError) as caught:
        load(FunctionReward(function="known_rewards:judge"))
    assert str(caught.value) == (
        f"the reward 'known_rewards:judge' would be taken from {elsewhere}/known_rewards.py, which Python has under the name "
        f"'known_rewards' already, and not from {project}/known_rewards.py; give that file another name"
    )


@pytest.mark.parametrize("name", ["json", "math"])
def test_a_file_with_a_name_of_python_itself_is_not_passed_over(project: Path, name: str) -> None:
    (project / f"{name}.py").write_text("def judge(row, completion):\n    return 1.0\n")
    with pytest.raises(RewardError, match=rf"would be taken from .*, and not from {project}/{name}.py"):
        load(FunctionReward(function=f"{name}:judge"))


def test_a_folder_of_data_hides_no_package(project: Path) -> None:
    (project / "json").mkdir()
    (project / "areno_fn" / "world").mkdir(parents=True)
    (project / "areno_fn" / "world" / "rewards.py").write_text("")
    assert load(FunctionReward(function="areno_fn.world.rewards:exact_match")).function is exact_match
    with pytest.raises(RewardError, match="module 'json' has no 'judge'"):
        load(FunctionReward(function="json:judge"))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("areno_fn.world.rewards.exact_match", "must be written package.module:function"),
        (":exact_match", "must be written package.module:function"),
        ("areno_fn.world.rewards:", "must be written package.module:function"),
        ("no_such_module_here:f", "does not import .ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("areno_fn.world.rewards:exakt", "module 'areno_fn.world.rewards' has no 'exakt'"),
        ("math:pi", "must be a function, but it is a float"),
    ],
)
def test_names_that_lead_nowhere(function: str, said: str) -> None:
    with pytest.raises(RewardError, match=said) as caught:
        load(FunctionReward(function=function))
    assert function in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("def judge(:", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_modules_that_fail_while_they_are_imported(project: Path, source: str, said: str) -> None:
    (project / "broken_rewards.py").write_text(source)
    with pytest.raises(RewardError, match=said) as caught:
        load(FunctionReward(function="broken_rewards:judge"))
    assert "'broken_rewards:judge' does not import" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_exception_names_the_reward_the_row_and_the_reason() -> None:
    def judge(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        return [float(completion) for completion in completions]

    with pytest.raises(
        RewardError, match=r"'judge' failed on row 2 \(sums.jsonl:3\): ValueError: could not convert"
    ) as caught:
        score([reward(judge)], ROWS, TEXTS)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_missing_answer_names_the_row() -> None:
    rows = [*ROWS[:2], Row({"prompt": "a"}, "other.jsonl", 8)]
    with pytest.raises(RewardError, match=r"row 2 \(other.jsonl:8\): ValueError: the row has no 'answer', only prompt"):
        score([reward(exact_match)], rows, TEXTS)


def test_an_exception_of_the_batch_alone() -> None:
    def judge(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        if len(rows) > 2:
            raise RuntimeError("too many")
        return [0.0] * len(rows)

    with pytest.raises(
        RewardError, match="on the batch of 3 rows, though on none of them alone: RuntimeError: too many"
    ):
        score([reward(judge)], ROWS, TEXTS)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned a NoneType; return a list of numbers"),
        (1.0, "returned a float; return a list of numbers"),
        ("abc", "returned a str; return a list of numbers"),
        ({"a": 1.0}, "returned a dict"),
        (torch.tensor(1.0), "returned a Tensor"),
        ([1.0, 2.0], "returned 2 values for 3 completions"),
        ([1.0] * 4, "returned 4 values for 3 completions"),
        ([1.0, "2", 3.0], r"returned a str for row 1 \(sums.jsonl:2\); it must be a number"),
        ([1.0, 2.0, None], r"returned a NoneType for row 2 \(sums.jsonl:3\)"),
        ([1.0, float("nan"), 3.0], r"returned nan for row 1 \(sums.jsonl:2\); it must be finite"),
        ([float("-inf"), 2.0, 3.0], r"returned -inf for row 0 \(sums.jsonl:1\)"),
        (torch.tensor([0.0, 1.0, float("nan")]), r"returned nan for row 2"),
        ([[1.0], [2.0], [3.0]], "returned a list for row 0"),
        ([1.0, 10**400, 3.0], r"returned inf for row 1 \(sums.jsonl:2\)"),
        ([1.0, Fraction(10**400), 3.0], r"returned inf for row 1 \(sums.jsonl:2\)"),
        ([1.0, 2.0, -1e39], r"returned -1e\+39 for row 2 \(sums.jsonl:3\)"),
        (torch.ones(3, device="meta"), "returned a tensor that holds no list of numbers"),
        (torch.ones(3).to_sparse(), "returned a tensor that holds no list of numbers"),
    ],
)
def test_what_a_reward_must_not_return(returned: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"the reward 'judge' {said}"):
        score([reward(lambda rows, completions: returned)], ROWS, TEXTS)


def test_a_weight_that_carries_a_sum_beyond_float32() -> None:
    rewards = [
        reward(lambda rows, completions: [0.0, 1e30, 0.0], 1e9),
        reward(lambda rows, completions: [1.0] * 3, name="other"),
    ]
    with pytest.raises(
        RewardError, match=r"the rewards of row 1 \(sums.jsonl:2\) add up to 1\S*e\+39 by their weights"
    ):
        score(rewards, ROWS, TEXTS)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0, True],
        (1.0, 0.0, 1.0),
        np.array([1.0, 0.0, 1.0], dtype=np.float32),
        [np.float32(1), np.int64(0), 1.0],
        torch.tensor([1, 0, 1]),
    ],
)
def test_what_a_reward_may_return(returned: Any) -> None:
    totals, parts = score([reward(lambda rows, completions: returned)], ROWS, TEXTS)
    assert totals == parts["judge"] == [1.0, 0.0, 1.0]
    assert all(type(value) is float for value in totals)


def test_rows_and_completions_are_the_rewards_own_copies() -> None:
    rows, texts = [Row(copy.deepcopy(dict(row)), row.file, row.line) for row in ROWS], list(TEXTS)

    def vandal(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        rows[0]["answer"] = "?"
        rows[1]["tags"].append("y")
        rows.pop()
        completions.clear()
        return [0.0, 0.0, 0.0]

    seen: list[Any] = []

    def witness(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        seen.append((rows, completions))
        return [0.0] * len(completions)

    score([reward(vandal, name="vandal"), reward(witness)], rows, texts)
    assert seen == [(ROWS, TEXTS)]
    assert (rows, texts) == (ROWS, TEXTS)
