"""Output folders of older releases: the run in them goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from e2e import tiny


def as_version_1(spec: Path) -> None:
    """Writes the recorded specification of a run as version 1 had it."""
    told = yaml.safe_load(spec.read_text(encoding="utf-8"))
    for table in (*told["phases"], told["evaluation"]):
        for reward in table["rewards"]:
            assert reward.pop("kind") == "function"
    spec.write_text(yaml.safe_dump(told | {"version": 1}), encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of 4 + 4 steps, with checkpoints after steps 6 and 8."""
    home = tmp_path_factory.mktemp("whole")
    assert tiny.run(tiny.write_spec(home), home / "out").code == 0
    return home / "out"


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """The same as a run of version 1 left it after step 6."""
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000008")
    as_version_1(tmp_path / "out" / "spec.yaml")
    return tmp_path / "out"


def test_a_run_of_version_1_goes_on_from_its_own_record_bit_for_bit(out: Path, whole: Path) -> None:
    done = tiny.in_process([str(out / "spec.yaml"), "--out", str(out), "--resume"])
    assert (done.code, done.err) == (0, "")
    assert tiny.difference(out, whole) is None
    assert yaml.safe_load((out / "spec.yaml").read_text())["version"] == 2


def test_what_has_changed_since_is_told_by_the_record_of_version_1(out: Path, tmp_path: Path) -> None:
    done = tiny.run(tiny.write_spec(tmp_path), out, "--resume", phases__grpo__rewards__0__weight=0.25)
    assert done.code == 2
    assert "phases.grpo.rewards.0.weight was 0.5 and is now 0.25" in done.err
    assert done.err.count(" and is now ") == 1
