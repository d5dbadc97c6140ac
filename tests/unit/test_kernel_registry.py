"""`python -m areno_fn.kernels` names every folder, and its figures belong to cases that exist."""

from __future__ import annotations

from pathlib import Path

import areno_fn.kernels
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


def test_figures_are_of_kernels_that_exist_and_are_shown() -> None:
    assert {label.split()[0] for label, _ in MEASURED} <= set(FOLDERS)
    shown = text(every_kernel())
    assert all(line in shown for _, line in MEASURED)
    assert shown.startswith("adamw (reference, triton): one update of all leaves")
