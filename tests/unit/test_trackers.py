"""Metrics and samples on disk: valid JSON whatever happens, and no step twice after a run continues."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import DataError
from areno_fn.world.clock import Stopwatch, monotonic, wall
from areno_fn.world.samples import Sample, SampleLog
from areno_fn.world.trackers import JsonlTracker, TensorBoardTracker, Tracker, combine, truncate


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[object]:
    return [line["step"] for line in lines(path)]


def logged(path: Path, *numbers: int, phase: str = "sft") -> None:
    tracker = JsonlTracker(path, clock=lambda: 0.0)
    for number in numbers:
        tracker.log(number, phase, {"train/loss": number / 2})
    tracker.close()


# ------------------------------------------------------------------------------------------ JSONL


def test_a_line_holds_step_phase_time_and_metrics(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", clock=lambda: 12.5)
    tracker.log(3, "sft", {"train/loss": 0.25, "train/tokens": 7})
    assert lines(tmp_path / "m.jsonl") == [
        {"step": 3, "phase": "sft", "time": 12.5, "train/loss": 0.25, "train/tokens": 7}
    ]
    tracker.close()


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, "sft", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300})
    tracker.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert '"a":null,"b":null,"c":null,"d":1e-300' in text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    """A process that is killed has lost nothing that it logged."""
    program = (
        "import os, sys; from areno_fn.world.trackers import JsonlTracker;"
        "t = JsonlTracker(sys.argv[1]);"
        "[t.log(i, 'sft', {'a': 1.0}) for i in range(5)]; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "m.jsonl")], timeout=60)
    assert done.returncode == -9
    assert steps(tmp_path / "m.jsonl") == [0, 1, 2, 3, 4]


def test_a_tracker_appends(tmp_path: Path) -> None:
    logged(tmp_path / "m.jsonl", 1, 2)
    logged(tmp_path / "m.jsonl", 3)
    assert steps(tmp_path / "m.jsonl") == [1, 2, 3]


# ------------------------------------------------------------------------------------------ truncation


def test_truncate_drops_later_steps_and_the_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    logged(path, 1, 2, 3, 4)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":2,"pha')
    truncate(path, after_step=2)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])


def test_truncate_drops_a_last_line_that_only_lacks_its_end(tmp_path: Path) -> None:
    """It cannot be told from a torn one whose missing part would have changed a number."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1,"phase":"a","x":1}\n{"step":2,"phase":"a","x":1')
    truncate(path, after_step=9)
    assert steps(path) == [1]


def test_truncate_drops_the_evaluation_before_a_phase_that_has_not_begun(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    logged(path, 1, 2)
    logged(path, 2, phase="grpo")
    truncate(path, after_step=2, phases=["sft"])
    assert [(line["step"], line["phase"]) for line in lines(path)] == [(1, "sft"), (2, "sft")]


def test_truncate_of_nothing_does_nothing(tmp_path: Path) -> None:
    truncate(tmp_path / "none.jsonl", after_step=3)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.jsonl").touch()
    truncate(tmp_path / "empty.jsonl", after_step=3)
    assert (tmp_path / "empty.jsonl").read_bytes() == b""


def test_truncate_refuses_a_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    text = '{"step":1,"phase":"a"}\nhello\n{"step":2,"phase":"a"}\n'
    path.write_text(text)
    with pytest.raises(DataError, match=r"m\.jsonl:2 is not a JSON object with a step and a phase; remove the line"):
        truncate(path, after_step=1)
    assert path.read_text() == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(total=st.integers(1, 12), saved=st.integers(0, 12), cut=st.integers(0, 60))
def test_killed_at_any_byte_and_continued_the_log_is_that_of_an_uninterrupted_run(
    tmp_path: Path, total: int, saved: int, cut: int
) -> None:
    path, straight = tmp_path / "m.jsonl", tmp_path / "straight.jsonl"
    saved = min(saved, total)
    for file in (path, straight):
        file.unlink(missing_ok=True)
        logged(file, *range(1, total + 1))
    whole = path.read_bytes()
    checkpointed = sum(len(line) for line in whole.splitlines(keepends=True)[:saved])
    path.write_bytes(whole[: max(checkpointed, len(whole) - cut)])
    truncate(path, after_step=saved)
    logged(path, *range(saved + 1, total + 1))
    assert path.read_bytes() == straight.read_bytes()


# ------------------------------------------------------------------------------------------ TensorBoard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, "sft", {"train/loss": 0.5, "train/lr": 1e-3})
    tracker.log(2, "grpo", {"train/loss": 0.25, "rollout/reward_mean": math.nan})
    tracker.close()
    assert scalars(tmp_path, "train/loss") == [(1, 0.5), (2, 0.25)]
    assert math.isnan(scalars(tmp_path, "rollout/reward_mean")[0][1])


def test_tensorboard_hides_the_steps_that_a_continued_run_repeats(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path / "a")
    for step in (1, 2, 3):
        first.log(step, "sft", {"train/loss": float(step)})
    first.close()
    second = TensorBoardTracker(tmp_path / "b", after_step=1)
    second.log(2, "sft", {"train/loss": 20.0})
    second.close()
    for number, folder in enumerate(("a", "b")):  # one folder, files in the order of their names
        for file in (tmp_path / folder).iterdir():
            file.rename(tmp_path / f"events.out.tfevents.{number}")
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 20.0)]


# ------------------------------------------------------------------------------------------ several, samples, clock


def test_combine_passes_everything_on_in_order(tmp_path: Path) -> None:
    calls: list[object] = []

    class Spy:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, phase: str, metrics: object) -> None:
            calls.append((self.name, step, phase, metrics))

        def close(self) -> None:
            calls.append((self.name, "closed"))

    both: Tracker = combine(Spy("a"), Spy("b"))
    both.log(1, "sft", {"x": 1.0})
    both.close()
    assert calls == [("a", 1, "sft", {"x": 1.0}), ("b", 1, "sft", {"x": 1.0}), ("a", "closed"), ("b", "closed")]
    combine().log(1, "sft", {})


def test_samples_are_lines_that_truncate_alike(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    log = SampleLog(path)
    log.log(1, "grpo", [Sample(prompt="1+1=", completion="2\n\x1b é", reward=1.0, answer="2")])
    log.log(
        2, "grpo", [Sample(prompt="1+2=", completion="", reward=math.nan), Sample(prompt="", completion="x", reward=0)]
    )
    log.close()
    assert lines(path)[0] == {
        "step": 1,
        "phase": "grpo",
        "prompt": "1+1=",
        "completion": "2\n\x1b é",
        "reward": 1.0,
        "answer": "2",
    }
    assert (lines(path)[1]["reward"], lines(path)[1]["answer"]) == (None, None)
    truncate(path, after_step=1)
    assert steps(path) == [1]


def test_what_samples_are_is_the_name_of_their_field(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "s.jsonl", "picture")
    log.log(1, "grpo", [Sample(prompt="3", completion="(8 x 8, mean 0.25)", reward=1.0)])
    log.close()
    (line,) = lines(tmp_path / "s.jsonl")
    assert list(line) == ["step", "phase", "prompt", "picture", "reward", "answer"]
    assert line["picture"] == "(8 x 8, mean 0.25)"


def test_a_stopwatch_measures_whole_and_laps() -> None:
    times = iter([10.0, 11.0, 13.5, 20.0, 20.0])
    watch = Stopwatch(lambda: next(times))
    assert (watch.lap(), watch.lap(), watch.seconds(), watch.lap()) == (1.0, 2.5, 10.0, 6.5)


def test_the_clocks_tell_seconds() -> None:
    assert wall() > 1.6e9
    before = monotonic()
    assert monotonic() >= before
