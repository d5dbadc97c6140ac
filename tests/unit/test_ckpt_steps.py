"""A root of states as crashes, people and other programs leave it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typeguard import suppress_type_checks

from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.state import Counters, Cursor, TrainState

IDENTITY = RunIdentity(family="f", model="m", phases="p", data="d", parameters="x", optimizers="o", seed=1)


def state(value: float = 1.0) -> TrainState:
    return TrainState(
        params={"actor": {"w": torch.full((8,), value)}},
        optim={},
        snapshots={},
        counters=Counters(),
        key=Key.of(0),
        cursor=Cursor(),
    )


def test_what_is_named_like_a_remainder_and_is_none_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / ".step-00000001.writing-1")  # opening it would wait for a writer
    (root / ".step-00000001.writing-2").symlink_to(elsewhere)
    (root / ".step-00000001.writing-3").write_text("notes")
    (root / ".step-00000001.writing-4").mkdir()
    folder = save_state(root, 1, state(), IDENTITY)
    left = sorted(path.name for path in root.iterdir() if path != folder)
    assert left == [".step-00000001.writing-1", ".step-00000001.writing-2", ".step-00000001.writing-3"]
    assert elsewhere.is_dir() and latest(root) == folder


def test_a_state_under_the_name_of_another_step_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    save_state(tmp_path, 1, state(), IDENTITY).rename(tmp_path / "step-00000077")
    newer = save_state(tmp_path, 2, state(2.0), IDENTITY)
    with pytest.raises(CheckpointError, match="step-00000077 holds the state of step 1; call it step-00000001"):
        latest(tmp_path)
    (tmp_path / "step-00000077").rename(tmp_path / "step-00000001")
    assert latest(tmp_path) == newer
    assert torch.equal(load_state(newer, state(), IDENTITY).params["actor"]["w"], torch.full((8,), 2.0))


@pytest.mark.parametrize("kind", ["file", "dangling", "loop"])
def test_a_root_that_is_no_folder_is_not_a_run_without_states(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    if kind == "file":
        root.write_text("")
    else:
        root.symlink_to(root if kind == "loop" else tmp_path / "not mounted")
    with pytest.raises(CheckpointError, match="root is not a folder"):
        latest(root)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_root_that_no_file_system_takes_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="choose another name"):
        latest(tmp_path / name)


@pytest.mark.parametrize(("step", "keep"), [(1.5, 1), (True, 1), ("1", 1), (1 << 63, 1), (1, 1.5), (1, True), (1, 0)])
def test_steps_and_numbers_of_states_are_integers(tmp_path: Path, step: Any, keep: Any) -> None:
    with suppress_type_checks(), pytest.raises(CheckpointError, match="step must be an integer of at least 0"):
        save_state(tmp_path, step, state(), IDENTITY, keep)
    assert not any(tmp_path.iterdir())
