"""Forms, time limits, async functions and current folders of rewards."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areno_fn.contracts.errors import RewardError
from areno_fn.contracts.spec import FunctionReward
from areno_fn.world.data_row import Row
from areno_fn.world.rewards import Loaded, Reward, load, load_all, score
from areno_fn.world.rewards_form import form_of, is_async

ROWS = [
    Row({"prompt": "1+1=", "answer": "2", "tags": ["x"]}, "sums.jsonl", line, source)
    for line, source in ((1, "easy"), (1, "easy"), (2, "hard"), (2, "hard"))
]
TEXTS = ["2", "3", "22", ""]


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


def reward(function: Callable[..., Any], name: str = "judge", **settings: Any) -> Reward:
    return Reward(name=name, weight=settings.pop("weight", 1.0), function=function, **settings)


def longest_of_group(row: dict[str, Any], completions: list[str]) -> list[float]:
    most = max(len(text) for text in completions)
    return [float(len(text) == most) for text in completions]


def right(row: dict[str, Any], completion: str) -> bool:
    return completion == row["answer"]


async def right_later(row: dict[str, Any], completion: str) -> float:
    await asyncio.sleep(0.001 * len(completion))
    return float(completion == row["answer"])


async def group_later(row: dict[str, Any], completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return longest_of_group(row, completions)


async def batch_later(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


class Model:
    """A reward model: what is expensive happens once."""

    made: int = 0

    def __init__(self) -> None:
        type(self).made += 1

    async def __call__(self, row: dict[str, Any], completion: str) -> float:
        return 2.0


def test_the_parameters_say_the_form() -> None:
    assert [form_of(f) for f in (right, right_later, Model())] == ["one"] * 3
    assert [form_of(f) for f in (longest_of_group, group_later)] == ["group"] * 2
    assert form_of(batch_later) == "batch"
    later = [right_later, Model(), functools.partial(Model())]
    assert [is_async(f) for f in (*later, right, functools.partial(right), lambda rows, completions: [])] == [
        True
    ] * 3 + [False] * 3


def swapped(completion: str, row: dict[str, Any]) -> float:
    return float(completion == row["answer"])


def between(row: dict[str, Any], weight: float = 2.0, completion: str = "") -> float:
    return weight * (completion == row["answer"])


def by_place(completion: str, row: dict[str, Any], /) -> float:
    return swapped(completion, row)


def by_name(*, completion: str, row: dict[str, Any], **rest: Any) -> float:
    return swapped(completion, row)


def scaled(scale: float, completion: str, row: dict[str, Any]) -> float:
    return scale * swapped(completion, row)


async def swapped_later(completions: list[str], row: dict[str, Any]) -> list[float]:
    return [swapped(text, row) for text in completions]


def swapped_batch(completions: list[str], rows: list[dict[str, Any]], *others: Any) -> list[float]:
    return [swapped(text, row) for text, row in zip(completions, rows, strict=True)]


@functools.wraps(swapped)
def wrapped(*given: Any, **named: Any) -> float:
    return swapped(*given, **named)


class Swapped:
    """Called as a function is."""

    def __call__(self, completion: str, row: dict[str, Any]) -> float:
        return swapped(completion, row)

    async def later(self, completion: str, row: dict[str, Any]) -> float:
        return swapped(completion, row)


@pytest.mark.parametrize(
    ("function", "worth"),
    [
        (swapped, 1.0),
        (between, 2.0),
        (by_place, 1.0),
        (by_name, 1.0),
        (functools.partial(scaled, 3.0), 3.0),
        (functools.partial(scaled, scale=3.0), 3.0),
        (swapped_later, 1.0),
        (functools.partial(swapped_later), 1.0),
        (swapped_batch, 1.0),
        (wrapped, 1.0),
        (Swapped(), 1.0),
        (Swapped().later, 1.0),
    ],
)
@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_a_reward_is_called_by_the_names_of_its_parameters(
    function: Callable[..., Any], worth: float, timeout: float
) -> None:
    assert score([reward(function, timeout=timeout)], ROWS, TEXTS, group=2)[0] == [worth, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (lambda a, b: [], "(a, b)"),
        (lambda prompt, completion: 0.0, "(prompt, completion)"),
        (lambda prompts, completions, **kw: [], "(prompts, completions, **kw)"),
        (lambda row, compeltion: 0.0, "(row, compeltion)"),
        (lambda rows, completion: [], "(rows, completion)"),
        (lambda rows, completions, answer: [], "(rows, completions, answer)"),
        (lambda row, completions=(), completion="": 0.0, "(row, completions=(), completion='')"),
        (lambda *given: [], "(*given)"),
        (functools.partial(scaled, completion=""), "(scale, *, completion='', row)"),
    ],
)
def test_a_reward_with_other_parameters_is_refused_by_their_names(
    function: Callable[..., Any], parameters: str
) -> None:
    with pytest.raises(RewardError) as caught:
        score([reward(function)], ROWS, TEXTS)
    assert str(caught.value) == (
        f"the reward 'judge' does not say what it is to be called with (its parameters are {parameters}); it must have the "
        f"parameters (rows, completions), (row, completions) or (row, completion), in any order, and a default for every other"
    )


def test_a_reward_whose_parameters_cannot_be_read_is_refused() -> None:
    with pytest.raises(RewardError, match=r"with \(it does not say what its parameters are called\); it must have"):
        score([reward(max)], ROWS, TEXTS)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (right, [1.0, 0.0, 0.0, 0.0]),
        (right_later, [1.0, 0.0, 0.0, 0.0]),
        (longest_of_group, [1.0, 1.0, 1.0, 0.0]),
        (group_later, [1.0, 1.0, 1.0, 0.0]),
        (batch_later, [1.0, 1.0, 2.0, 0.0]),
    ],
)
@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_every_form_judges_every_completion(
    function: Callable[..., Any], expected: list[float], timeout: float
) -> None:
    totals, parts = score([reward(function, timeout=timeout)], ROWS, TEXTS, group=2)
    assert totals == parts["judge"] == expected


def test_a_group_gets_its_completions_and_one_row() -> None:
    seen: list[Any] = []

    def watch(row: dict[str, Any], completions: list[str]) -> list[float]:
        seen.append((row, completions))
        return [0.0] * len(completions)

    score([reward(watch)], ROWS, TEXTS, group=2)
    assert seen == [(dict(ROWS[0]), TEXTS[:2]), (dict(ROWS[2]), TEXTS[2:])]
    seen.clear()
    score([reward(watch)], ROWS, TEXTS)
    assert [len(texts) for _, texts in seen] == [1, 1, 1, 1], "in an evaluation every group has one completion"


def test_several_rewards_of_several_forms_add_up_by_weight() -> None:
    rewards = [reward(right, "right", weight=2.0), reward(group_later, "long", weight=-0.5)]
    totals, parts = score(rewards, ROWS, TEXTS, group=2)
    assert parts == {"right": [1.0, 0.0, 0.0, 0.0], "long": [1.0, 1.0, 1.0, 0.0]}
    assert totals == [1.5, -0.5, -0.5, 0.0]


def test_a_reward_judges_the_data_sets_it_is_for() -> None:
    rewards = [
        reward(batch_later, "length"),
        reward(right, "right", weight=10.0, sources=frozenset({"easy"})),
        reward(longest_of_group, "long", weight=5.0, sources=frozenset({"hard"})),
        reward(right, "never", sources=frozenset({"other"})),
    ]
    totals, parts = score(rewards, ROWS, TEXTS, group=2)
    assert parts == {"length": [1.0, 1.0, 2.0, 0.0], "right": [1.0, 0.0], "long": [1.0, 0.0]}
    assert totals == [11.0, 1.0, 7.0, 0.0]


def test_a_failure_behind_others_names_its_own_row() -> None:
    hard = reward(lambda row, completion: 1 / len(completion), sources=frozenset({"hard"}))
    with pytest.raises(RewardError, match=r"'judge' failed on row 3 \(sums.jsonl:2\): ZeroDivisionError"):
        score([hard], ROWS, TEXTS, group=2)


@pytest.mark.parametrize("later", [False, True])
def test_no_form_can_change_the_data(later: bool) -> None:
    rows, texts = list(ROWS), list(TEXTS)
    before = [dict(row) | {"tags": list(row["tags"])} for row in rows]

    def change(row: Any, completions: Any) -> Any:
        row["answer"] = "?"
        row["tags"].append("y")
        if isinstance(completions, list):
            completions.clear()

    def one(row: Any, completion: Any) -> float:
        change(row, completion)
        return 0.0

    def group(row: Any, completions: Any) -> list[float]:
        count = len(completions)
        change(row, completions)
        return [0.0] * count

    async def one_later(row: Any, completion: Any) -> float:
        return one(row, completion)

    async def group_of_later(row: Any, completions: Any) -> list[float]:
        return group(row, completions)

    vandals = [one_later, group_of_later] if later else [one, group]
    for number, vandal in enumerate(vandals):
        score([reward(vandal, str(number)), reward(right, "witness")], rows, texts, group=2)
        assert rows == before
        assert texts == TEXTS


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda row, completion: "1", r"returned a str for row 0 \(sums.jsonl:1\); it must be a number"),
        (lambda row, completion: [1.0], r"returned a list for row 0"),
        (lambda row, completion: float("nan"), r"returned nan for row 0 .*; it must be finite"),
        (lambda row, completions: 1.0, r"returned a float; return a list of numbers"),
        (lambda row, completions: [1.0], r"returned 1 values for 2 completions; return one number for each"),
        (lambda row, completions: [1.0, None], r"returned a NoneType for row 1 \(sums.jsonl:1\)"),
    ],
)
def test_what_a_form_must_not_return(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(RewardError, match=f"the reward 'judge' {said}"):
        score([reward(function)], ROWS, TEXTS, group=2)


def test_at_most_so_many_calls_wait_at_once() -> None:
    now, most = 0, 0

    async def count(row: dict[str, Any], completion: str) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(3):
            await asyncio.sleep(0)
        now -= 1
        return 0.0

    score([reward(count, at_once=3)], ROWS * 5, TEXTS * 5)
    assert most == 3
    most = 0
    score([reward(count, at_once=1)], ROWS, TEXTS)
    assert most == 1


def test_async_calls_share_one_event_loop_for_as_long_as_the_process_lives() -> None:
    loops = []

    async def remember(row: dict[str, Any], completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 0.0

    for _ in range(2):
        score([reward(remember)], ROWS, TEXTS)
    assert len(set(loops)) == 1


@pytest.mark.parametrize("form", ["batch", "group", "one"])
def test_a_field_that_no_row_has_is_told_with_those_that_it_has(form: str) -> None:
    calls: dict[str, Any] = {
        "batch": lambda rows, pictures: [float(len(row["caption"])) for row in rows],
        "group": lambda row, pictures: [float(len(row["caption"])) for _ in pictures],
        "one": lambda row, picture: float(len(row["caption"])),
    }
    row = Row({"prompt": "a heron", "animal": "bird"}, "rows.jsonl", 1)
    said = r"^the reward 'judge' failed on row 0 \(rows.jsonl:1\): KeyError: 'caption'; the row has animal, prompt$"
    with pytest.raises(RewardError, match=said):
        score([reward(calls[form])], [row, row], [0, 1], group=2)


@pytest.mark.parametrize("key", ["prompt", 3, ("a",), [1]])
def test_another_key_error_is_told_as_it_is(key: Any) -> None:
    def fail(row: dict[str, Any], completion: str) -> float:
        raise KeyError(key)

    with pytest.raises(RewardError, match=rf"failed on row 0 \(rows.jsonl:1\): KeyError: {re.escape(repr(key))}$"):
        score([reward(fail)], [Row({"prompt": "1"}, "rows.jsonl", 1)], ["1"])


def test_what_pictures_are_worth_is_told_of_pictures() -> None:
    with pytest.raises(RewardError, match=r"'judge' returned 1 values for 2 pictures; return one number for each$"):
        score([reward(lambda rows, pictures: [1.0])], ROWS[:2], [0, 1])
    slow = reward(lambda rows, pictures: time.sleep(60), timeout=0.01)
    with pytest.raises(RewardError, match=r"gave no answer on the batch of 2 pictures within its timeout of 0.01 s"):
        score([slow], ROWS[:2], [0, 1])


def test_a_failure_of_an_async_call_names_its_row_and_ends_the_others() -> None:
    ended = []

    async def fail(row: dict[str, Any], completion: str) -> float:
        if completion == "22":
            raise KeyError("no such thing")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append(completion)
            raise
        return 0.0

    with pytest.raises(
        RewardError, match=r"'judge' failed on row 2 \(sums.jsonl:2\): KeyError: 'no such thing'"
    ) as caught:
        score([reward(fail)], ROWS, TEXTS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(ended) == ["", "2", "3"]


def test_a_failure_of_an_async_batch_is_looked_for_row_by_row() -> None:
    async def fail(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        return [1 / len(text) for text in completions]

    with pytest.raises(RewardError, match=r"'judge' failed on row 3 \(sums.jsonl:2\): ZeroDivisionError"):
        score([reward(fail)], ROWS, TEXTS)


async def give_up(row: dict[str, Any], completion: str) -> float:
    raise asyncio.CancelledError


async def leave(row: dict[str, Any], completion: str) -> float:
    sys.exit(3)


@pytest.mark.parametrize(("function", "said"), [(give_up, "CancelledError"), (leave, "SystemExit: 3")])
def test_an_async_call_that_ends_itself(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(RewardError, match=f"the reward 'judge' failed on row 0 .*{said}"):
        score([reward(function)], ROWS[:1], TEXTS[:1])
    assert score([reward(right_later)], ROWS, TEXTS)[0] == [1.0, 0.0, 0.0, 0.0], "the loop still turns"


def hangs(released: threading.Event) -> list[tuple[Callable[..., Any], str]]:
    async def one_later(row: dict[str, Any], completion: str) -> float:
        await asyncio.sleep(600 if completion == "22" else 0)
        return 0.0

    async def stubborn(row: dict[str, Any], completion: str) -> float:
        released.wait(600)  # never gives the loop back
        return 0.0

    def one(row: dict[str, Any], completion: str) -> float:
        if completion == "22":
            released.wait(600)
        return 0.0

    def batch(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        released.wait(600)
        return [0.0] * len(completions)

    return [
        (one_later, r"on row 2 \(sums.jsonl:2\)"),
        (one, r"on row 2 \(sums.jsonl:2\)"),
        (batch, "on the batch of 4 completions"),
        (stubborn, "on the batch of 4 completions"),
    ]


@pytest.mark.parametrize("number", range(4))
def test_a_reward_that_hangs_ends_in_a_sentence(number: int) -> None:
    released = threading.Event()
    function, where = hangs(released)[number]
    try:
        with pytest.raises(
            RewardError, match=rf"^the reward 'judge' gave no answer {where} within its timeout of 0.05 s; raise"
        ):
            score([reward(function, timeout=0.05)], ROWS, TEXTS)
        assert score([reward(right_later)], ROWS, TEXTS)[0] == [1.0, 0.0, 0.0, 0.0], "other rewards go on"
    finally:
        released.set()


def test_a_timeout_error_of_ones_own_is_no_timeout() -> None:
    async def fail(row: dict[str, Any], completion: str) -> float:
        raise TimeoutError("the judge's server")

    for timeout in (0.0, 30.0):
        with pytest.raises(RewardError, match=r"failed on row 0 .*: TimeoutError: the judge's server"):
            score([reward(fail, timeout=timeout)], ROWS, TEXTS)


@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_a_reward_that_changes_the_folder_leaves_the_run_where_it_is(project: Path, timeout: float) -> None:
    (project / "elsewhere").mkdir()

    def wander(row: dict[str, Any], completion: str) -> float:
        os.chdir("elsewhere")  # would fail the second time if the first had stayed there
        return 1.0

    async def wander_later(rows: list[dict[str, Any]], completions: list[str]) -> list[float]:
        os.chdir("elsewhere")
        return [1.0] * len(rows)

    def lost(row: dict[str, Any], completion: str) -> float:
        os.chdir("elsewhere")
        raise ValueError("lost")

    for function in (wander, wander_later):
        assert score([reward(function, timeout=timeout)], ROWS, TEXTS)[0] == [1.0] * 4
        assert Path.cwd() == project
    with pytest.raises(RewardError, match="ValueError: lost"):
        score([reward(lost, timeout=timeout)], ROWS, TEXTS)
    assert Path.cwd() == project


def test_a_module_that_changes_the_folder_leaves_the_run_where_it_is(project: Path) -> None:
    (project / "elsewhere").mkdir()
    (project / "moving_rewards.py").write_text(
        "import os\nos.chdir('elsewhere')\n"
        "class Judge:\n    def __init__(self):\n        os.chdir('elsewhere')\n"
        "    def __call__(self, row, completion):\n        return 1.0\n"
    )
    assert score([load(FunctionReward(function="moving_rewards:Judge"))], ROWS, TEXTS)[0] == [1.0] * 4
    assert Path.cwd() == project


def test_a_class_is_made_once_for_all_who_share_it(project: Path) -> None:
    (project / "model_rewards.py").write_text(
        "MADE = []\nclass Model:\n    def __init__(self):\n        MADE.append(self)\n"
        "    def __call__(self, row, completion):\n        return 2.0\n"
    )
    spec = FunctionReward(function="model_rewards:Model", name="model")
    loaded: Loaded = {}
    (training,) = load_all([spec], loaded)
    (held_out,) = load_all([FunctionReward(function="model_rewards:Model", weight=3.0, timeout=5.0)], loaded)
    assert training.function is held_out.function
    assert (training.name, held_out.name, held_out.weight, held_out.timeout, training.timeout) == (
        "model",
        "Model",
        3.0,
        5.0,
        0.0,
    )
    assert score([held_out], ROWS[:1], TEXTS[:1])[0] == [6.0]
    assert len(sys.modules["model_rewards"].MADE) == 1
    load_all([spec])
    assert len(sys.modules["model_rewards"].MADE) == 2, "another run has another model"


@pytest.mark.parametrize(
    ("body", "settings", "said"),
    [
        (
            "class judge:\n    def __init__(self, path): pass",
            {},
            r"is a class and cannot be made without arguments \(TypeError",
        ),
        ("class judge: pass", {}, r"must be a function, but it is a judge"),
        (
            "def judge(row): pass",
            {},
            r"does not say what it is to be called with \(its parameters are \(row\)\); it must have the parameters",
        ),
        ("def judge(): pass", {}, r"does not say what it is to be called with \(its parameters are \(\)\)"),
        ("def judge(row, completion, *, key): pass", {}, r"does not say .*\(row, completion, \*, key\)"),
        (
            "def judge(row, completion): pass",
            {"concurrency": 4},
            r"is called one time after the other, so `concurrency`",
        ),
        (
            "async def judge(rows, completions): pass",
            {"concurrency": 4},
            r".*so `concurrency` says nothing; .* an async function of \(row, completions\) or \(row, completion\)$",
        ),
    ],
)
def test_rewards_that_are_refused_before_they_are_asked(
    project: Path, body: str, settings: dict[str, Any], said: str
) -> None:
    (project / "refused_rewards.py").write_text(body + "\n")
    with pytest.raises(RewardError, match=rf"^the reward 'refused_rewards:judge' {said}") as caught:
        load(FunctionReward(function="refused_rewards:judge", **settings))
    assert "\n" not in str(caught.value)


def test_a_reward_of_pictures_is_told_in_their_words(project: Path) -> None:
    (project / "plain_pictures.py").write_text("def judge(rows, pictures): pass\n")
    said = r"so `concurrency` says nothing; remove it, or write an async function of \(row, pictures\) or \(row, picture\)$"
    with pytest.raises(RewardError, match=said):
        load(FunctionReward(function="plain_pictures:judge", concurrency=4), medium="pictures")


def test_settings_reach_the_reward(project: Path) -> None:
    (project / "set_rewards.py").write_text("async def judge(row, completion): pass\n")
    found = load(FunctionReward(function="set_rewards:judge", data=["a", "b"], timeout=2.5, concurrency=4))
    assert (found.sources, found.timeout, found.at_once) == (frozenset({"a", "b"}), 2.5, 4)
    assert load(FunctionReward(function="set_rewards:judge")).at_once == 16
