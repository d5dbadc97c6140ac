"""`python -m areno_fn.check` says what is here, what is not, and why."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import areno_fn.kernels
from areno_fn.check import command
from areno_fn.command import main
from areno_fn.engine import machine, smoke
from areno_fn.engine.machine import Finding, findings

CPU = torch.device("cpu")


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in findings()}


def test_the_versions_are_those_of_this_process() -> None:
    here = found()
    assert here["Python"].detail.startswith(platform.python_version())
    assert here["PyTorch"].detail.startswith(torch.__version__)
    assert here["transformers"].detail == importlib.metadata.version("transformers")


def test_everything_needed_is_here_where_the_tests_run() -> None:
    assert [finding for finding in findings() if finding.ok is False] == []


def test_every_triton_kernel_is_tried() -> None:
    folders = Path(areno_fn.kernels.__path__[0]).iterdir()
    halves = {"ordered_attention", "ordered_linear"}  # take half precision alone: tests/gpu compares their bits
    assert set(smoke.SMOKE) == {folder.name for folder in folders if (folder / "triton.py").exists()} - halves
    assert set(smoke.SMOKE) <= {name.split(" on cpu ")[0] for name in found()}


@pytest.mark.parametrize("kernel", sorted(smoke.SMOKE))
def test_a_kernel_that_is_slightly_wrong_is_noticed(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smoke.largest_error(kernel, CPU) < machine.TOLERANCE
    right = smoke.SMOKE[kernel]
    monkeypatch.setitem(smoke.SMOKE, kernel, lambda x: right(x) * (1.001 if x.dtype == torch.float32 else 1))
    failing = found()[f"{kernel} on cpu (reference)"]
    assert failing.ok is False


def test_a_kernel_that_raises_is_a_finding_with_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setitem(smoke.SMOKE, "rotary", broken)
    failing = found()["rotary on cpu (reference)"]
    assert (failing.ok, failing.detail) == (False, "RuntimeError: no C compiler")


def test_a_missing_package_is_named_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REQUIRED", ("no-such-package",))
    monkeypatch.setattr(machine, "OPTIONAL", {"nor-this": "nothing works"})
    here = found()
    assert here["no-such-package"] == Finding(
        name="no-such-package", ok=False, detail="not installed; `pip install no-such-package`"
    )
    assert here["nor-this"] == Finding(name="nor-this", ok=None, detail="not installed, so nothing works")


def test_no_gpu_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cuda_count", lambda: (0, ""))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found()["CUDA"].detail == "this PyTorch was built without CUDA; everything runs on the CPU"
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert found()["CUDA"].detail == "PyTorch is built for CUDA 12.9, but no GPU answers"
    monkeypatch.setattr(machine, "_cuda_count", lambda: (0, "the driver is too old"))
    assert found()["CUDA"] == Finding(name="CUDA", ok=None, detail="the driver is too old")


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cuda_count", lambda: (1, ""))
    monkeypatch.setattr(machine, "_devices", lambda: [CPU])
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    for name, value in (
        ("mem_get_info", (2**30, 3 * 2**30)),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "NVIDIA H200"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)
    here = found()
    assert here["CUDA device 0"].detail == "NVIDIA H200, 1.0 GiB of 3.0 GiB free, capability 9.0"
    monkeypatch.setattr(machine.importlib, "util", SimpleNamespace(find_spec=lambda name: None))
    assert found()["Triton"] == Finding(name="Triton", ok=False, detail="not installed; kernels on the GPU need it")


def test_the_command_prints_a_line_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Everything needed is here."
    assert len(lines) == len(list(findings())) + 2
    assert any(line.startswith("yes  PyTorch ") for line in lines)


def test_the_command_exits_with_0_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "REQUIRED", ("no-such-package",))
    assert main(command, []) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Failing: no-such-package."


def test_json_is_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, ["--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert {entry["name"] for entry in read} == set(found())
    assert all(set(entry) == {"name", "ok", "detail"} for entry in read)
