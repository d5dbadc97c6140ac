"""The tools on what a run leaves behind: an adapter of a model on disk, and everything beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from e2e import tiny
from safetensors.torch import load_file

from areno_fn.ckpt.tools.arguments import command
from areno_fn.ckpt.tools.convert import convert

SPEC = tiny.ROOT / "specs/lora.toml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base in bfloat16, and the output folder of a run that trained an adapter of it."""
    root = tmp_path_factory.mktemp("run")
    first = tiny.run(SPEC, root / "first", phases__sft__steps=1, phases__grpo__steps=1, evaluation__limit=1)
    assert first.code == 0, first.err
    base = convert(root / "first/export", root / "base", dtype="bfloat16")
    model = json.dumps({"kind": "hf", "path": str(base)})
    short = {
        "phases__sft__steps": 3,
        "phases__grpo__steps": 1,
        "evaluation__limit": 1,
        "checkpoint__every": 2,
        "checkpoint__keep": 3,
    }
    done = tiny.run(SPEC, root / "out", model=model, tokenizer='{"kind": "byte"}', **short)
    assert done.code == 0, done.err
    return base, root / "out"


def test_the_merged_export_of_a_run_is_the_adapter_merged_into_the_files_of_the_base(
    run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = run
    assert command(["convert", str(base), str(tmp_path / "merged"), "--merge", str(out / "adapter")]) == 0
    assert command(["diff", str(out / "export"), str(tmp_path / "merged")]) == 0, capsys.readouterr().out
    assert command(["diff", str(base), str(tmp_path / "merged")]) == 1
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_everything_that_a_run_leaves_is_whole(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run
    places = [out / "export", out / "adapter", *(out / "checkpoints").glob("step-*")]
    assert len(places) == 5
    for place in places:
        assert command(["verify", str(place), "--values"]) == 0, capsys.readouterr().out
        assert command(["inspect", str(place)]) == 0


def test_two_checkpoints_differ_in_the_adapter_and_not_in_the_base(
    run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer, *_ = sorted((run[1] / "checkpoints").glob("step-*"))
    assert command(["diff", str(older), str(newer), "--pattern", "params.base.*"]) == 0
    assert command(["diff", str(older), str(newer), "--pattern", "params.actor.*"]) == 1
    assert command(["diff", str(newer), str(newer)]) == 0
