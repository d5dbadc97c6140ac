"""Checkpoints are written while a run goes on, and however it ends the last one is whole by then."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from e2e import judges, tiny
from e2e.test_kill import JUDGED, failing, interrupt

from areno_fn.ckpt import disk
from areno_fn.ckpt.background import Writer
from areno_fn.ckpt.snapshot import HostMemory
from areno_fn.ckpt.verify import verify_state
from areno_fn.world.display import PlainDisplay
from areno_fn.world.trackers import JsonlTracker


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    judges.prepare()
    return tiny.write_spec(tmp_path, JUDGED)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which every file takes its time, so that a run is always ahead of it."""
    sync = disk.sync

    def late(descriptor: int) -> None:
        threading.Event().wait(0.03)
        sync(descriptor)

    monkeypatch.setattr(disk, "sync", late)


def test_the_next_step_does_not_wait_for_the_disk(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint, after step 2, is not let to the disk before step 3 has been logged."""
    stepped = threading.Event()
    make, log = disk.make_folder, JsonlTracker.log

    def held(path: Path) -> None:
        assert stepped.wait(60)
        make(path)

    def watched(self: JsonlTracker, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        log(self, step, phase, metrics)
        if step == 3:
            stepped.set()

    monkeypatch.setattr(disk, "make_folder", held)
    monkeypatch.setattr(JsonlTracker, "log", watched)
    assert tiny.run(spec, tmp_path / "out").code == 0
    assert stepped.is_set()


def test_how_long_saving_held_up_the_training_is_told_with_the_next_step(spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "out").code == 0
    lines = tiny.lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines if "time/checkpoint" in line] == [3, 5, 7]
    assert all("time/step" in line and line["time/checkpoint"] > 0 for line in lines if "time/checkpoint" in line)


def test_saving_takes_no_memory_that_was_not_reserved(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking memory takes longer than the copy; it is done beside the first steps of a phase."""
    taken: list[tuple[int, int]] = []
    copy = HostMemory.copy

    def watched(self: HostMemory, tensors: Mapping[str, Any]) -> Any:
        before = self.nbytes
        copies = copy(self, tensors)
        taken.append((before, self.nbytes))
        return copies

    monkeypatch.setattr(HostMemory, "copy", watched)
    assert tiny.run(spec, tmp_path / "out").code == 0
    assert len(taken) == 4 and all(before == after > 0 for before, after in taken)


@pytest.mark.usefixtures("slow")
def test_the_end_of_a_run_waits_for_its_last_checkpoint(spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "out").code == 0
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == 8


def terminate() -> float:
    os.kill(os.getpid(), signal.SIGTERM)
    return 0.25


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("ask", [interrupt, terminate])
def test_an_interruption_waits_for_the_checkpoint(ask: judges.Answer, spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25, ask])
    assert tiny.run(spec, tmp_path / "out").code == 130
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == 6


@pytest.mark.usefixtures("slow")
def test_a_failed_reward_waits_for_the_checkpoint(spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25] * 3 + [failing, failing])
    done = tiny.run(spec, tmp_path / "out", checkpoint__every=1)
    assert done.code == 2 and "continue with: python -m areno_fn.run" in done.out
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == 7


def refusing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A disk that takes so many checkpoints and no more."""
    create = disk.create

    def refused(path: Path) -> int:
        if int(re.findall(r"step-(\d+)", str(path))[0]) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(path)

    monkeypatch.setattr(disk, "create", refused)


@pytest.mark.parametrize("after", [2, 6])
def test_a_write_that_fails_ends_the_run_with_a_sentence(
    after: int, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After step 2 it is the next save that hears of it, after step 6 the end of the run."""
    refusing(monkeypatch, after)
    done = tiny.run(spec, tmp_path / "out")
    place = tmp_path / "out" / "checkpoints"
    assert done.code == 2
    (sentence,) = done.err.splitlines()
    assert sentence.startswith(f"error: {place}/step-{after + 2:08} could not be written (No space left on device")
    assert sentence.endswith("what was there before is untouched")
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == after
    assert not (tmp_path / "out" / "export").exists()
    monkeypatch.undo()
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume").code == 0


def test_a_failed_reward_and_a_full_disk_are_two_sentences(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges.prepare(training=[0.25] * 3 + [failing, failing])
    refusing(monkeypatch, 6)
    done = tiny.run(spec, tmp_path / "out")
    assert done.code == 2
    first, second = done.err.splitlines()
    assert "the reward 'short' failed on row" in first and "step-00000007 could not be written" in second
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == 6


def test_a_full_disk_at_a_ctrl_c_is_said(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judges.prepare(training=[0.25, 0.25, interrupt])
    refusing(monkeypatch, 6)
    done = tiny.run(spec, tmp_path / "out")
    assert done.code == 2 and "step-00000007 could not be written" in done.err


def test_an_error_in_the_library_is_a_traceback(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(disk, "create", broken)
    with pytest.raises(ZeroDivisionError):
        tiny.run(spec, tmp_path / "out")


def interrupt_twice() -> float:
    interrupt()
    return interrupt()


@pytest.mark.usefixtures("slow")
def test_a_second_interruption_says_what_it_waits_for(spec: Path, tmp_path: Path) -> None:
    judges.prepare(training=[0.25, 0.25, interrupt_twice])
    done = tiny.run(spec, tmp_path / "out")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert done.out.endswith("waiting until the last checkpoint is whole; interrupt once more to give it up\n")
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == 6


def test_a_third_interruption_gives_the_last_checkpoint_up(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs over the checkpoint after step 6 until the third one has come; the one after step 4 stays."""
    judges.prepare(training=[0.25, 0.25, interrupt_twice])
    writers: list[Writer] = []
    enter, make, message = Writer.__enter__, disk.make_folder, PlainDisplay.message

    def entered(self: Writer) -> Writer:
        writers.append(self)
        return enter(self)

    def hangs(path: Path) -> None:
        if "step-00000006" in path.name:
            assert writers[0]._given_up.wait(60)
        make(path)

    def watched(self: PlainDisplay, text: str) -> None:
        message(self, text)
        if text.startswith("waiting"):
            threading.Timer(0.2, interrupt).start()

    monkeypatch.setattr(Writer, "__enter__", entered)
    monkeypatch.setattr(disk, "make_folder", hangs)
    monkeypatch.setattr(PlainDisplay, "message", watched)
    done = tiny.run(spec, tmp_path / "out")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert verify_state(tiny.last_checkpoint(tmp_path / "out")).step == 4
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
