"""A run that is stopped, at any moment and in any way, continues as if it had never stopped; another run does not."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import judges, kill, tiny

from areno_fn.contracts.state import TrainState
from areno_fn.engine import session
from areno_fn.engine.recorder import Recorder
from areno_fn.world.jsonl_log import JsonlLog

JUDGED = (
    tiny.SPEC.replace("areno_fn.world.rewards:exact_match", "e2e.judges:evaluation")
    .replace("areno_fn.world.rewards:length_penalty", "e2e.judges:by_length")
    .replace("weight = 0.5, ", "")
)
"""The tiny run with rewards that a test can make do things; see `judges`."""

LINES = 2 * 4 + 2 * 3
"""Lines of metrics.jsonl: steps, and evaluations at 0, 2 and 4, of both phases."""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    judges.prepare()
    return tiny.write_spec(tmp_path, JUDGED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that was left alone."""
    home = tmp_path_factory.mktemp("whole")
    judges.prepare()
    assert tiny.run(tiny.write_spec(home, JUDGED), home / "out").code == 0
    return home / "out"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc to see when a run has begun")
def test_K16_K20_S5_killed_at_random_moments_a_run_continues_bit_for_bit(tmp_path: Path) -> None:
    found = list(kill.moments(tmp_path, count=3, seed=1))
    assert len(found) == 3
    assert [str(moment) for moment in found if moment.difference is not None] == []
    assert any("killed" in moment.kills[0] for moment in found)


class Killed(BaseException):
    """Stands for a death that runs no handler."""


@pytest.mark.parametrize("number", range(1, LINES))
def test_D13_K16_dying_after_any_line_changes_nothing(
    number: int, whole: Path, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every moment between two lines of the log; the random ones above also fall inside writes."""
    die_after(monkeypatch, "tracker_line", number)
    with pytest.raises(Killed):
        tiny.run(spec, tmp_path / "out")
    monkeypatch.undo()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


@pytest.mark.parametrize("first", [1, 3])
def test_D13_dying_twice_and_between_checkpoint_and_log_changes_nothing(
    first: int, whole: Path, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for saves in (first, 1):
        die_after(monkeypatch, "save", saves)
        with pytest.raises(Killed):
            tiny.run(spec, tmp_path / "out", "--resume")
        monkeypatch.undo()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def die_after(monkeypatch: pytest.MonkeyPatch, event: str, count: int) -> None:
    """Makes the run die right after the `count`-th logged line or saved checkpoint."""
    owner, name = {
        "tracker_line": ("areno_fn.world.trackers.JsonlTracker", "log"),
        "save": ("areno_fn.engine.recorder.Recorder", "save"),
    }[event]
    monkeypatch.setattr(f"{owner}.{name}", dying(_attribute(owner, name), count))


def _attribute(owner: str, name: str) -> Callable[..., Any]:
    module, _, cls = owner.rpartition(".")
    found: Callable[..., Any] = getattr(getattr(sys.modules[module], cls), name)
    return found


def dying(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    left = [count]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            raise Killed
        return result

    return call


@pytest.mark.parametrize("stage", ["export", "curves.draw", "summary.write"])
def test_dying_after_the_last_step_leaves_the_rest_to_be_made(
    stage: str, whole: Path, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object, **kwargs: object) -> None:
        raise Killed

    place = {"export": "areno_fn.engine.session.export", "curves.draw": "areno_fn.world.curves.draw"}
    monkeypatch.setattr(place.get(stage, "areno_fn.engine.summary.write"), die)
    with pytest.raises(Killed):
        tiny.run(spec, tmp_path / "out")
    monkeypatch.undo()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None
    assert (tmp_path / "out" / "curves.png").read_bytes() == (whole / "curves.png").read_bytes()


def test_a_line_cut_off_in_the_middle_is_written_again(whole: Path, tmp_path: Path) -> None:
    spec = whole.parent / "tiny.toml"
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out" / "checkpoints" / "step-00000008").rename(tmp_path / "gone")
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = tmp_path / "out" / name
        path.write_bytes(path.read_bytes()[:-9])
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


# ------------------------------------------------------------------------------------ Ctrl-C


def interrupt() -> float:
    os.kill(os.getpid(), signal.SIGINT)
    return 0.25


def interrupt_twice() -> float:
    interrupt()
    return interrupt()


@pytest.mark.parametrize(
    ("training", "evaluation", "stopped_after"),
    [
        ([], [0.25, interrupt], 2),  # while evaluating after a step
        ([], [interrupt], 1),  # while evaluating before the first
        ([0.25, interrupt], [], 6),  # while a reward is asked
        ([], [0.25, 0.25, interrupt], 4),  # in the last step of a phase
    ],
)
def test_ctrl_c_ends_after_the_step_with_a_checkpoint(
    training: list[judges.Answer],
    evaluation: list[judges.Answer],
    stopped_after: int,
    whole: Path,
    spec: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    judges.prepare(training, evaluation)
    done = tiny.run(spec, tmp_path / "out")
    assert (done.code, done.err) == (130, "")
    assert capfd.readouterr().err == "stopping after this step; interrupt once more to stop at once\n"
    last = done.out.splitlines()[-1]
    command = f"python -m areno_fn.run {tmp_path / 'out' / 'spec.yaml'} --resume"
    assert last == f"stopped after step {stopped_after}; continue with: {command}"
    assert tiny.last_checkpoint(tmp_path / "out").name == f"step-{stopped_after:08}"
    assert not (tmp_path / "out" / "export").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    continued = tiny.in_process(command.split()[3:])
    assert (continued.code, continued.err) == (0, "")
    assert tiny.difference(whole, tmp_path / "out") is None


def test_ctrl_c_in_the_very_last_step_is_too_late(whole: Path, spec: Path, tmp_path: Path) -> None:
    judges.prepare(evaluation=[0.25] * 4 + [interrupt])
    assert tiny.run(spec, tmp_path / "out").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_a_second_ctrl_c_ends_at_once_and_the_run_still_continues(whole: Path, spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25, 0.25, interrupt_twice])
    done = tiny.run(spec, tmp_path / "out")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert tiny.last_checkpoint(tmp_path / "out").name == "step-00000006"
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_ctrl_c_while_weights_are_loaded_leaves_nothing_behind(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = JUDGED[: JUDGED.index("[model]")] + JUDGED[JUDGED.index("[[phases]]") :]
    text = text.replace("\n[[phases]]", f'\nmodel = {{ kind = "hf", path = "{whole / "export"}" }}\n[[phases]]', 1)
    spec = tiny.write_spec(tmp_path, text)
    read = _attribute("areno_fn.ckpt.stream", "fill")

    def interrupted(*args: Any) -> Any:
        interrupt()
        return read(*args)

    monkeypatch.setattr("areno_fn.ckpt.stream.fill", interrupted)
    done = tiny.run(spec, tmp_path / "out")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert tiny.files(tmp_path / "out") == {}
    monkeypatch.undo()
    assert tiny.run(spec, tmp_path / "out").code == 0


def test_ctrl_c_reaches_a_process(tmp_path: Path) -> None:
    tiny.write_spec(tmp_path)
    process = tiny.popen(["tiny.toml", "--set", "phases.grpo.steps=5000"], tmp_path)
    kill.wait_for(process, lambda: kill.logged(tmp_path) > 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert err == "stopping after this step; interrupt once more to stop at once\n"
    assert re.fullmatch(
        r"stopped after step \d+; continue with: python -m areno_fn.run out/spec.yaml --resume", out.splitlines()[-1]
    )


# ------------------------------------------------------------------------------------ resume


def test_continuing_a_complete_run_changes_nothing(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    before = tiny.files(tmp_path / "out")
    judges.prepare()
    done = tiny.run(whole.parent / "tiny.toml", tmp_path / "out", "--resume")
    assert (done.code, done.err) == (0, "")
    after = tiny.files(tmp_path / "out")
    assert {name for name in before if before[name] != after.get(name)} == {"spec.yaml"}  # it names another folder
    assert after.keys() == before.keys()
    assert judges.calls == {"training": 0, "evaluation": 0}


def test_resume_without_a_run_starts_one(whole: Path, spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"phases.sft.batch.rows": 4}, "phases.sft.batch.rows was 8 and is now 4"),
        ({"seed": 3}, "seed was 0 and is now 3"),
        ({"phases.sft.optimizers.0.lr": 0.5}, "phases.sft.optimizers.actor.lr was 0.003 and is now 0.5"),
        (
            {"phases.grpo.algorithm.kl_coef": 0.2, "phases.grpo.rewards.0.weight": 2.0},
            "phases.grpo.algorithm.kl_coef was 0.1 and is now 0.2; phases.grpo.rewards.0.weight was 1.0 and is now 2.0",
        ),
        ({"phases.sft.steps": 5}, "phases.sft.steps was 4 and is now 5"),
        ({"phases.grpo.data.0.count": 19}, "phases.grpo.data.0.count was 20 and is now 19"),
        (
            {"model.config.hidden_size": 64, "model.config.head_dim": 32},
            "model.config.hidden_size was 32 and is now 64; model.config.head_dim was 16 and is now 32",
        ),
        (
            {"phases.grpo.optimizers.0.schedule": '{"kind": "linear"}'},
            'phases.grpo.optimizers.actor.schedule.kind was "constant" and is now "linear"',
        ),
    ],
)
def test_S1_another_specification_is_refused_by_the_fields_that_differ(
    values: dict[str, Any], named: str, whole: Path
) -> None:
    before = tiny.files(whole)
    words = [str(whole.parent / "tiny.toml"), "--out", str(whole), "--resume", *tiny.changes(values)]
    done = tiny.in_process(words)
    assert done.code == 2
    (sentence,) = done.err.splitlines()
    place = whole / "checkpoints" / "step-00000008"
    assert sentence.startswith(
        f"error: {place} belongs to another run: {named}; resume with the specification it was started with"
    )
    assert tiny.files(whole) == before


@pytest.mark.parametrize(
    "values",
    [
        {"log.samples": 1},
        {"checkpoint.every": 1},
        {"evaluation.every": 1},
        {"evaluation.data.0.count": 5},
        {"export.dtype": "bfloat16"},
        {"device": "auto"},
        {"name": "another"},
    ],
)
def test_S1_what_changes_no_step_may_change(values: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    words = [str(whole.parent / "tiny.toml"), "--out", str(tmp_path / "out"), "--resume", *tiny.changes(values)]
    done = tiny.in_process(words)
    assert (done.code, done.err) == (0, "")
    assert tiny.state(tmp_path / "out") == tiny.state(whole)


def test_other_rows_in_the_same_file_are_another_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    source = JUDGED.split('data = [{ kind = "arithmetic", digits = 1, count = 20 }]')
    spec = tiny.write_spec(tmp_path, f'data = [{{ kind = "jsonl", path = "{rows}" }}]'.join(source))
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", phases__grpo__steps=1).code == 0
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "3"}\n')
    done = tiny.run(spec, tmp_path / "out", "--resume", phases__grpo__steps=1)
    assert done.code == 2
    assert "belongs to another run: the rows of the data changed; resume with" in done.err
    moved = tmp_path / "moved.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    rows.rename(moved)
    values = {"phases__grpo__steps": 1, "phases__grpo__data__0__path": str(moved)}
    assert tiny.run(spec, tmp_path / "out", "--resume", **values).code == 0


def test_the_last_phase_may_become_longer(whole: Path, spec: Path, tmp_path: Path) -> None:
    """As if it had been asked for from the beginning: the steps do not depend on how many there are."""
    assert tiny.run(spec, tmp_path / "long", phases__grpo__steps=6).code == 0
    shutil.copytree(whole, tmp_path / "out")
    done = tiny.run(spec, tmp_path / "out", "--resume", phases__grpo__steps=6)
    assert (done.code, done.err) == (0, "")
    assert tiny.difference(tmp_path / "long", tmp_path / "out") is None


def test_an_interrupted_last_phase_may_become_longer_and_shorter(spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "long", phases__grpo__steps=6).code == 0
    judges.prepare(training=[0.25, 0.25, interrupt])
    assert tiny.run(spec, tmp_path / "out").code == 130
    cut = tiny.run(spec, tmp_path / "out", "--resume", phases__grpo__steps=2)
    assert (cut.code, cut.err.splitlines()) == (
        2,
        ["error: phases.grpo: 3 of its steps are done, so it cannot be cut to 2; ask for at least 3"],
    )
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume", phases__grpo__steps=6).code == 0
    assert tiny.difference(tmp_path / "long", tmp_path / "out") is None


def test_a_phase_cut_to_what_is_done_ends_there(spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25, 0.25, interrupt])
    assert tiny.run(spec, tmp_path / "out").code == 130
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume", phases__grpo__steps=3).code == 0
    assert tiny.run(spec, tmp_path / "short", phases__grpo__steps=3).code == 0
    assert tiny.difference(tmp_path / "short", tmp_path / "out") is None


def test_epochs_may_become_more(tmp_path: Path) -> None:
    text = JUDGED[: JUDGED.index('[[phases]]\nname = "grpo"')].replace("steps = 4", "epochs = 1")
    spec = tiny.write_spec(tmp_path, text)
    assert tiny.run(spec, tmp_path / "long", phases__sft__epochs=3, log__tensorboard=False).code == 0
    for epochs in (1, 2, 3):
        flags = ["--resume"] if epochs > 1 else []
        done = tiny.run(spec, tmp_path / "out", *flags, phases__sft__epochs=epochs, log__tensorboard=False)
        assert (done.code, done.err) == (0, "")
    assert tiny.difference(tmp_path / "long", tmp_path / "out") is None


def test_a_rate_that_decays_over_the_phase_ties_its_length(tmp_path: Path) -> None:
    schedule = 'lr = 0.003, schedule = { kind = "cosine", warmup_steps = 1 } }]\nrewards'
    text = JUDGED.replace("lr = 0.003 }]\nrewards", schedule)
    assert text != JUDGED
    spec = tiny.write_spec(tmp_path, text)
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out").code == 0
    done = tiny.run(spec, tmp_path / "out", "--resume", phases__grpo__steps=6)
    assert done.code == 2
    assert "phases.grpo.steps was 4 and is now 6" in done.err


def test_O9_the_rate_after_resuming_is_that_of_the_step(tmp_path: Path) -> None:
    text = JUDGED.replace("lr = 0.003 }]", 'lr = 0.003, schedule = { kind = "linear", warmup_steps = 2 } }]')
    spec = tiny.write_spec(tmp_path, text)
    judges.prepare()
    assert tiny.run(spec, tmp_path / "whole").code == 0
    judges.prepare(evaluation=[0.25, interrupt])
    assert tiny.run(spec, tmp_path / "out").code == 130
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    rates = [line["train/lr"] for line in tiny.lines(tmp_path / "out" / "metrics.jsonl") if "train/lr" in line]
    # warm-up over 2 steps to 0.003, then down to 0 at step 4; the second phase makes two updates a step
    assert rates[:4] == pytest.approx([0.0015, 0.003, 0.0015, 0.0])
    assert tiny.difference(tmp_path / "whole", tmp_path / "out") is None


def test_tensorboard_hides_what_is_written_again(spec: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    judges.prepare(training=[0.25, interrupt_twice])
    assert tiny.run(spec, tmp_path / "out", log__tensorboard=True).code == 130
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume", log__tensorboard=True).code == 0
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


# ------------------------------------------------------------------------------------ failures on the way


def failing() -> float:
    raise ZeroDivisionError("no denominator")


def test_a_reward_that_fails_costs_no_step(whole: Path, spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25, 0.25, failing, failing])
    done = tiny.run(spec, tmp_path / "out")
    assert done.code == 2
    (sentence,) = done.err.splitlines()
    assert re.fullmatch(
        r"error: the reward 'short' failed on row 0 \(arithmetic\(1 digits, train, seed 0\):\d+\): "
        r"ZeroDivisionError: no denominator",
        sentence,
    )
    assert "stopped by an error; when it is mended, continue with: python -m areno_fn.run" in done.out
    assert tiny.last_checkpoint(tmp_path / "out").name == "step-00000006"
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_a_reward_that_fails_between_two_checkpoints_leaves_one_more(whole: Path, spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25] * 3 + [failing, failing])
    assert tiny.run(spec, tmp_path / "out", checkpoint__every=0).code == 2
    assert tiny.last_checkpoint(tmp_path / "out").name == "step-00000007"
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_an_evaluation_that_fails_at_the_end_of_a_phase_is_made_again(whole: Path, spec: Path, tmp_path: Path) -> None:
    judges.prepare(evaluation=[0.25] * 2 + [failing, failing])
    assert tiny.run(spec, tmp_path / "out").code == 2
    assert tiny.last_checkpoint(tmp_path / "out").name == "step-00000004"
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_a_reward_that_fails_at_once_leaves_no_checkpoint(spec: Path, tmp_path: Path) -> None:
    judges.prepare(evaluation=[failing, failing])
    done = tiny.run(spec, tmp_path / "out")
    assert done.code == 2
    assert "continue" not in done.out
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_damaged_checkpoint_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    data = tiny.last_checkpoint(tmp_path / "out") / "params.actor.safetensors"
    bits = bytearray(data.read_bytes())
    bits[-5] ^= 1
    data.write_bytes(bits)
    done = tiny.run(whole.parent / "tiny.toml", tmp_path / "out", "--resume")
    assert done.code == 2
    assert done.err.startswith(f"error: {data} is damaged: its SHA-256 is ")


# ------------------------------------------------------------------------------------ memory


@pytest.mark.traced  # without typeguard, which keeps the arguments of every call
def test_the_state_a_phase_began_with_does_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judges.prepare()
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    stepped = Recorder.stepped

    def look(self: Recorder, state: TrainState, *rest: Any) -> None:
        seen.append(weakref.ref(state.params["actor"].embed))
        gc.collect()
        alive.append(
            len({id(found) for ref in seen if (found := ref()) is not None})
        )  # steps may write where it stands
        stepped(self, state, *rest)

    monkeypatch.setattr(Recorder, "stepped", look)
    spec = tiny.write_spec(tmp_path, JUDGED)
    assert tiny.run(spec, tmp_path / "out", phases__grpo__algorithm__kl_coef=0.0).code == 0
    assert alive == [1] * 8


@pytest.mark.traced
def test_a_start_is_not_kept_by_whoever_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judges.prepare()
    first: list[weakref.ref[torch.Tensor]] = []
    make = session.initial_state

    def made(*args: Any) -> TrainState:
        state = make(*args)
        first.append(weakref.ref(state.params["actor"].embed))
        return state

    alive: list[bool] = []
    stepped = Recorder.stepped

    def look(self: Recorder, *rest: Any) -> None:
        gc.collect()
        alive.append(first[0]() is not None)
        stepped(self, *rest)

    monkeypatch.setattr(session, "initial_state", made)
    monkeypatch.setattr(Recorder, "stepped", look)
    spec = JUDGED.replace('kind = "adamw"', 'kind = "sgd"')  # which never writes where the start stands
    assert tiny.run(tiny.write_spec(tmp_path, spec), tmp_path / "out").code == 0
    assert alive == [False] * 8


def test_a_folder_of_states_without_a_whole_one_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    for folder in (tmp_path / "out" / "checkpoints").iterdir():
        (folder / "manifest.msgpack").unlink()
    done = tiny.run(whole.parent / "tiny.toml", tmp_path / "out", "--resume")
    assert done.code == 2
    assert "but none is complete; remove them to start anew" in done.err


def test_a_full_disk_is_a_sentence_and_the_run_continues_when_there_is_room(
    whole: Path, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log takes half a line and then no more, as a disk does that fills up."""
    append = JsonlLog.append
    left = [9]

    def full(self: JsonlLog, line: Any) -> None:
        left[0] -= 1
        if left[0]:
            append(self, line)
            return
        self._file.write(b'{"step": 6, "pha')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonlLog, "append", full)
    done = tiny.run(spec, tmp_path / "out")
    assert (done.code, done.err) == (
        2,
        "error: the disk refused to write (No space left on device); what was saved before is whole\n",
    )
    monkeypatch.undo()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    tiny.write_spec(tmp_path)
    first = tiny.popen(["tiny.toml", "--set", "phases.grpo.steps=5000"], tmp_path)
    try:
        kill.wait_for(first, lambda: kill.logged(tmp_path) > 2)
        second = tiny.run(tmp_path / "tiny.toml", tmp_path / "out", "--resume")
        assert (second.code, second.out) == (2, "")
        assert re.fullmatch(r"error: out: another run is writing to .*/out; wait for its end, or .*\n", second.err)
    finally:
        first.kill()
        first.communicate()
    assert tiny.run(tmp_path / "tiny.toml", tmp_path / "out", "--overwrite").code == 0
