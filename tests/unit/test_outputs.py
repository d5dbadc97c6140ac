"""The output folder: looked at before anything is done, and never more than a run's own files removed from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from areno_fn.contracts.errors import SpecError
from areno_fn.engine.outputs import Outputs, inspect, prepare

MAY = "choose a folder that you may write to"


def refused(path: Path | str, *, resume: bool = False, overwrite: bool = False) -> str:
    with pytest.raises(SpecError) as caught:
        inspect(str(path), resume=resume, overwrite=overwrite)
    with pytest.raises(SpecError) as again:
        prepared(path, resume=resume, overwrite=overwrite)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def prepared(path: Path | str, *, resume: bool = False, overwrite: bool = False) -> Outputs:
    with prepare(str(path), resume=resume, overwrite=overwrite) as outputs:
        return outputs


def a_run(root: Path) -> Outputs:
    outputs = Outputs(root)
    for folder in (outputs.checkpoints / "step-00000001", outputs.export, outputs.tensorboard):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    for file in (outputs.metrics, outputs.samples, outputs.summary, outputs.curves, outputs.spec):
        file.write_text("x")
    (root / "notes.txt").write_text("mine")
    return outputs


def test_inspecting_makes_nothing(tmp_path: Path) -> None:
    outputs = inspect(str(tmp_path / "a" / "b"), resume=False, overwrite=False)
    assert outputs.root == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_preparing_makes_the_folder_and_nothing_in_it(tmp_path: Path) -> None:
    outputs = prepared(tmp_path / "a" / "b")
    assert list(outputs.root.iterdir()) == []


def test_a_relative_folder_is_one_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepared("deep/out")
    assert (tmp_path / "deep" / "out").is_dir()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert refused(file) == f"out: {file} cannot be written ({file} is not a folder); {MAY}"
    assert refused(file / "a" / "b") == f"out: {file}/a/b cannot be written ({file} is not a folder); {MAY}"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert refused(link / "out") == f"out: {link}/out cannot be written ({link} is not a folder); {MAY}"


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the system, because an administrator may write everywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    sentence = f"out: {tmp_path}/a/b cannot be written (no permission to write in {tmp_path}); {MAY}"
    assert refused(tmp_path / "a" / "b") == sentence


def test_what_only_writing_shows_is_the_same_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(
        SpecError, match=rf"^out: {tmp_path}/out cannot be written \(.*: No space left on device\); {MAY}$"
    ):
        prepared(tmp_path / "out")


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "export", "summary.json"])
def test_any_trace_of_a_run_is_a_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    assert refused(tmp_path) == (
        f"out: {tmp_path} already holds a run ({name}); pass --resume to continue it, --overwrite to start it afresh, or "
        f"choose another folder"
    )


def test_other_files_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    prepared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_resuming_touches_nothing(tmp_path: Path) -> None:
    a_run(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    prepared(tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["folder", "pipe", "link"]
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "summary.json", "curves.png", "spec.yaml"])
def test_what_would_be_written_to_is_a_file(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / name)
    words = f"out: {tmp_path}/{name} is no file, as a run needs it; move it elsewhere, or choose another folder"
    with pytest.raises(SpecError) as found:
        inspect(str(tmp_path), resume=True, overwrite=False, occupied=True)
    assert str(found.value) == words
    if (name, make) == ("spec.yaml", Path.mkdir):  # the only one that overwriting leaves in its place
        assert refused(tmp_path, overwrite=True) == words
    else:
        prepared(tmp_path, overwrite=True)
        assert set(tmp_path.iterdir()) <= {tmp_path / "spec.yaml"}


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "pictures", "export", "adapter"])
def test_what_would_be_written_in_is_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(SpecError, match=f"out: {tmp_path}/{name} is no folder, as a run needs it; move"):
        prepared(tmp_path, resume=True)


def test_overwriting_removes_a_run_and_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path)
    prepared(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "spec.yaml"]


def test_overwriting_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    mine = a_run(tmp_path / "mine").root
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export").symlink_to(mine)
    (tmp_path / "out" / "critic").symlink_to(tmp_path / "nowhere")
    prepared(tmp_path / "out", overwrite=True)
    assert list((tmp_path / "out").iterdir()) == []
    assert (mine / "export" / "file").exists()


def test_a_run_that_is_half_removed_cannot_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints go first: with its logs gone and a checkpoint left, another run would go on unnoticed."""
    outputs = a_run(tmp_path)
    rmtree = shutil.rmtree

    def once(path: Path) -> None:
        rmtree(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", once)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, overwrite=True)
    assert not outputs.checkpoints.exists()
    assert outputs.metrics.exists()


def test_only_one_of_both_flags(tmp_path: Path) -> None:
    assert refused(tmp_path, resume=True, overwrite=True) == (
        "--resume continues the run in the output folder and --overwrite deletes it; pass one of them"
    )


@pytest.mark.parametrize("flags", [{"resume": True}, {"overwrite": True}])
def test_two_runs_cannot_have_one_folder_at_once(flags: dict[str, bool], tmp_path: Path) -> None:
    outputs = a_run(tmp_path)
    with prepare(str(tmp_path), resume=True, overwrite=False):
        with pytest.raises(SpecError) as caught:
            prepared(tmp_path, **flags)
        assert str(caught.value) == (
            f"out: another run is writing to {tmp_path}; wait for its end, or choose another folder"
        )
        assert outputs.metrics.exists()
    prepared(tmp_path, **flags)


def test_where_files_cannot_be_locked_a_run_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    assert prepared(tmp_path).root == tmp_path


@pytest.mark.parametrize(
    ("path", "why"),
    [("", "it names no folder"), ("x" * 300, "File name too long"), ("a\0b", "embedded null byte")],
    ids=["empty", "long", "NUL"],
)
def test_a_path_that_can_be_none(path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"cannot be written ({why}); " in refused(path)
    assert list(tmp_path.iterdir()) == []
