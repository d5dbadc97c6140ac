"""Every benchmark explains itself, and says in one sentence what it needs and this machine has not."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from areno_fn.contracts.errors import ArenoError
from benchmarks import needs, train_step

PLACE = Path(needs.__file__).parent
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PLACE.glob("*.py"))}
COMMANDS = [name for name, source in SOURCES.items() if "__main__" in source]
CPU = "needs a CUDA device, and torch sees none"
TINY = "tiny runs on a CPU"


def ended(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> object:
    """The exit code of `python -m benchmarks.NAME`."""
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        needs.run(module.main)
    return ended.value.code


def test_every_benchmark_ends_as_a_command_and_is_imported_as_one() -> None:
    assert len(COMMANDS) >= 15 and set(SOURCES) - set(COMMANDS) == {"checkpoint_cases", "flow_peer", "needs"}
    for name in COMMANDS:
        assert SOURCES[name].endswith('if __name__ == "__main__":\n    needs.run(main)\n'), name
    for name, source in SOURCES.items():
        siblings = [other for other in SOURCES if f"\nfrom {other} import" in source or f"\nimport {other}" in source]
        assert siblings == [], f"{name}: python -m benchmarks.{name} does not find {siblings}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, name, "--help") == 0
    told = capsys.readouterr()
    assert told.out.startswith("usage:") and "--help" in told.out and told.err == ""


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("kernels", "", f"the time of a Triton kernel {CPU}"),
        ("kernel_tiles", "", CPU),
        ("sanitize", "", CPU),
        ("captured", "", f"{CPU}; --device cpu --without"),
        ("captured", "--device cpu", f"an update that is captured {CPU}"),
        ("train_step", "--model qwen3-0.6b", f"--model qwen3-0.6b {CPU}; --model {TINY}"),
        ("train_step", "--ours captured", f"a captured step, which is a CUDA graph, {CPU}; leave captured out"),
        ("rollout", "", f"--shape qwen3-0.6b {CPU}; --shape {TINY}"),
        ("rollout", "--shape tiny --tune", f"{CPU}; leave --kernels and --tune out"),
        ("consistency", "", f"--shape qwen3-0.6b {CPU}; --shape {TINY}"),
        ("flow_step", "--shape sd3.5-medium", f"--shape sd3.5-medium {CPU}; --shape {TINY}"),
        ("adapters", "--shape qwen3-0.6b", f"--shape qwen3-0.6b {CPU}; --shape {TINY}"),
        ("variants", "--shape qwen3-0.6b", f"--shape qwen3-0.6b {CPU}; --shape {TINY}"),
        ("checkpoint", "--folder nowhere", "--folder nowhere is not a folder"),
        ("background_save", "--folder nowhere", "--folder nowhere is not a folder"),
        ("grpo_iteration", "--model nowhere", "nowhere is not there; a Hugging Face folder is needed"),
        ("muon", "--spec nowhere.toml", "nowhere.toml: no such file"),
        ("learning", "--only rlooo", "invalid choice: 'rlooo'"),
        ("flow_step", "--pixels 31", "--pixels must be a multiple of 16, received 31"),
        ("flow_step", "--rows 3", "--rows must be a multiple of --micro, received 3 and 2"),
        ("captured", "--hidden 32", "--hidden must be a multiple of 64"),
        ("train_step", "--steps 1", "--steps must be at least 2"),
    ],
)
def test_what_is_lacking_is_a_sentence(
    name: str,
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ended(monkeypatch, name, *arguments.split()) == 2
    told = capsys.readouterr()
    assert words in told.err and "Traceback" not in told.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == []


@pytest.mark.parametrize(
    "case",
    [
        "fulll/stored/2x16",
        "plain/stored",
        "plain/bf16/2x16",
        "plain/stored/2by16",
        "every:0/stored/2x16",
        "",
        "a/b/c/d",
    ],
)
def test_a_case_that_is_none_is_not_measured_as_another(case: str) -> None:
    with pytest.raises(needs.NeedsError, match="is no case; it is label/precision/shape"):
        train_step._case(case)


def test_cases_that_are_some() -> None:
    for label in (*train_step.PEERS, "plain", "captured+every:2", "full"):
        assert train_step._case(f"{label}/master/4x256") == train_step.Case(label, "master", "4x256")


def test_a_package_that_is_not_there() -> None:
    assert find_spec("no_such_package") is None
    with pytest.raises(ArenoError, match="a peer needs the package no-such-package, which is not installed"):
        needs.package("no_such_package", "a peer", "no-such-package")
    needs.package("torch", "a peer", "torch")


def test_what_is_not_measured_says_so() -> None:
    assert needs.gigabytes(None) == "not measured" and needs.gigabytes(1.234).strip() == "1.23 GB"
    assert needs.tflops(8.0523e14) == "805 TFLOP/s" and needs.tflops(4.2e10) == "0.042 TFLOP/s"
