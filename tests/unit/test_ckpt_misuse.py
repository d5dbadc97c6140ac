"""Commands of the tools that nobody means: each is a sentence, and nothing on the disk changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ckpt_toys import write_folder

from areno_fn.ckpt.tools.arguments import command
from areno_fn.command import MISTAKE, main

TENSORS = {"up.weight": torch.arange(6.0).reshape(2, 3), "count": torch.arange(3)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "base", TENSORS)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    name = "base_model.model.up.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(1, 3), name.format("B"): torch.ones(2, 1)}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(command, [str(argument) for argument in arguments]) == MISTAKE
    return capsys.readouterr().err


def test_a_folder_is_not_written_into_what_is_read(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "convert", base, base / "new")
    assert said == f"error: {base}/new is in {base}, which is read; write to a folder outside\n"
    assert "is in" in refused(capsys, "convert", base, adapter / "new", "--merge", adapter)
    assert not (base / "new").exists() and not (adapter / "new").exists()


def test_the_folder_around_what_is_read_is_not_replaced(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "which would be lost" in refused(capsys, "convert", base, base.parent)
    assert (base / "model.safetensors").is_file()


def test_two_adapters_are_not_silently_one(base: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "convert", base, base.parent / "out", "--merge", adapter, "--merge", adapter)
    assert "--merge takes one adapter" in said and not (base.parent / "out").exists()


def test_numbers_beyond_the_dtype_asked_for_do_not_become_infinite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = write_folder(tmp_path / "wide", {"w": torch.tensor([1e300, 1.0], dtype=torch.float64)})
    said = refused(capsys, "convert", wide, tmp_path / "out", "--dtype", "float32")
    assert said == "error: 'w' holds numbers beyond torch.float32; write with another --dtype\n"
    assert not (tmp_path / "out").exists()


def test_infinities_that_were_there_stay(tmp_path: Path) -> None:
    given = write_folder(tmp_path / "given", {"w": torch.tensor([float("inf"), float("nan")])})
    assert main(command, ["convert", str(given), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0


def test_a_pattern_that_lists_nothing_is_said(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "inspect", base, "--pattern", "up") == f"error: no tensor of {base} matches 'up'\n"


@pytest.mark.parametrize(
    ("place", "words"), [("/", "/ holds no checkpoint"), ("/dev/null", "/dev/null is neither a file nor a folder")]
)
def test_places_that_are_no_checkpoint(place: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, "inspect", place)


def test_a_command_whose_output_is_closed_ends_as_if_it_were_read(base: Path) -> None:
    line = f"exec '{sys.executable}' -m areno_fn.ckpt verify '{base}' >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
