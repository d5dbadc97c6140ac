"""A run reads nothing from where it deletes or writes, and says what is left there of another specification."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from e2e import tiny

SHORT = {"phases__sft__steps": 1, "phases__grpo__steps": 1, "evaluation": None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of 1 + 1 steps that exports an average."""
    home = tmp_path_factory.mktemp("whole")
    done = tiny.run(tiny.write_spec(home), home / "out", **SHORT, phases__grpo__ema={})
    assert (done.code, done.err) == (0, "")
    return home / "out"


@pytest.mark.parametrize("flags", [["--overwrite"], ["--overwrite", "--dry-run"], ["--resume"]])
def test_a_run_does_not_delete_or_replace_its_own_source(flags: list[str], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = tiny.files(out)
    for name in ("export", "export_ema"):
        if flags == ["--resume"] and name == "export_ema":
            continue
        model = {"kind": "hf", "path": str(out / name)}
        done = tiny.run(tiny.write_spec(tmp_path), out, *flags, model=model, **SHORT)
        assert done.code == 2
        assert done.err.startswith(f"error: model.path: {out / name} lies in {out / name}, which ")
        assert len(done.err.splitlines()) == 1
    assert tiny.files(out) == before


@pytest.mark.parametrize("flags", [["--resume"], ["--resume", "--dry-run"]])
def test_what_was_trained_is_not_replaced_by_a_run_that_begins_anew(
    flags: list[str], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints")
    before = tiny.files(out)
    done = tiny.run(tiny.write_spec(tmp_path), out, *flags, **SHORT)
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert f"out: {out / 'export'} is there, but no checkpoint that a run could be continued from; " in done.err
    assert tiny.files(out) == before


def test_a_run_is_started_afresh_from_the_record_in_its_own_folder(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    done = tiny.run(out / "spec.yaml", out, "--overwrite")
    assert (done.code, done.err) == (0, "")
    assert tiny.difference(whole, out) is None


def test_what_is_left_of_another_specification_is_said_and_stays(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    left = tiny.files(out / "export_ema")
    values = {**SHORT, "phases__grpo__steps": 2, "phases__grpo__ema": {"evaluate": True, "export": True}}
    done = tiny.run(tiny.write_spec(tmp_path), out, "--resume", **values)
    assert (done.code, done.err) == (0, "") and "was there before" not in done.out
    kept = {"evaluate": True, "export": False}
    evaluated = {name: value for name, value in values.items() if name != "evaluation"}
    done = tiny.run(tiny.write_spec(tmp_path), out, "--resume", **evaluated | {"phases__grpo__ema": kept})
    assert (done.code, done.err) == (0, "")
    assert f"{out / 'export_ema'} was there before; this specification does not write it" in done.out
    assert left.keys() == tiny.files(out / "export_ema").keys()
