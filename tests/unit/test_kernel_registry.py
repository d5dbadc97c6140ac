"""`python -m areno_fn.kernels` names every folder, and its figures belong to cases that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import areno_fn.kernels
from areno_fn.command import main
from areno_fn.kernels.__main__ import command
from areno_fn.kernels.measured import MEASURED
from areno_fn.kernels.registry import every_kernel, text

FOLDERS = sorted(path.parent.name for path in Path(areno_fn.kernels.__file__).parent.glob("*/__init__.py"))


def test_every_folder_is_there_with_what_it_has() -> None:
    found = {kernel.name: kernel for kernel in every_kernel()}
    assert sorted(found) == FOLDERS
    assert found["rms_norm"].backends == ("reference", "triton") and found["attention"].backends == (
        "reference",
        "triton",
    )
    assert found["rms_norm"].hot[0] == "1x131072x1024 bfloat16 plain"
    assert all(kernel.purpose for kernel in found.values())


def test_every_kernel_with_cases_is_held_to_them() -> None:
    texts = "\n".join(
        path.read_text(encoding="utf-8") for path in (Path(__file__).parents[1] / "property").glob("*.py")
    )
    for folder in FOLDERS:
        if (Path(areno_fn.kernels.__file__).parent / folder / "cases.py").exists():
            assert f"kernels.{folder} import cases" in texts or f"kernels.{folder}.cases import" in texts, folder


def test_the_command_shows_those_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, ["rotary", "adamw"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("rotary (reference, triton): ") and "\nadamw (" in told and "rms_norm (" not in told
    assert main(command, ["rotari"]) == 2 and main(command, ["x"]) == 2
    told = capsys.readouterr().err
    assert (
        "there is no kernel 'rotari'; the nearest is 'rotary'" in told
        and "there is no kernel 'x'; there are adamw" in told
    )
    with pytest.raises(SystemExit) as ended:
        main(command, ["--help"])
    assert ended.value.code == 0 and "[NAME ...]" in capsys.readouterr().out


def test_figures_are_of_kernels_that_exist_and_are_shown() -> None:
    assert {label.split()[0] for label, _ in MEASURED} <= set(FOLDERS)
    shown = text(every_kernel())
    assert all(line in shown for _, line in MEASURED)
    assert shown.startswith("adamw (reference, triton): one update of all leaves")
