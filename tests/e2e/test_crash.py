"""Small versions of `crash.py`: saves cut off, processes killed, disks full."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
from e2e import crash
from e2e.faulty_disk import Fault

from areno_fn.ckpt.manifest import MANIFEST
from areno_fn.contracts.errors import CheckpointError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs tools of Linux")


@pytest.mark.parametrize(("fault", "every"), [("stop", 3), ("kill", 7), (FULL, 5)], ids=["stop", "kill", "full"])
def test_K16_K17_a_save_in_the_background_that_is_cut_off_leaves_the_old_state(
    fault: Fault, every: int, tmp_path: Path
) -> None:
    """Files of several pieces; `crash.py cuts` cuts at every one."""
    found = crash.cuts(tmp_path, 20_000, 1, fault, every)
    assert found.before > 0 and found.after > 0 and found.operations["write"] > 0


@linux
def test_K16_a_process_that_is_killed_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    found = list(crash.kills(tmp_path / "states", count=4, seed=3, width=2_000))
    assert len(found) == 4 and found[-1].found > 0


def test_K16_a_root_that_held_states_never_begins_anew(tmp_path: Path) -> None:
    right = crash.Trajectory(10)
    for step in (1, 2):
        crash.save(tmp_path, step, right, keep=2)
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    assert crash.newest(tmp_path, right) == 1
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="but none is complete; remove them to start anew"):
        crash.newest(tmp_path, right)


@linux
def test_a_full_disk_ends_with_a_sentence_and_the_old_checkpoint_whole(tmp_path: Path) -> None:
    found = crash.full(tmp_path)
    assert found.kept == "step-00000002"
    assert "/step-00000004 could not be written (" in found.sentence
    assert found.sentence.endswith("); what was there before is untouched")
