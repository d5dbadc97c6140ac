"""Runs with every optimizer: stopped and continued they are the runs that were never stopped, bit for bit."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from e2e import tiny

KINDS: dict[str, dict[str, Any]] = {
    "muon": {
        "kind": "muon",
        "groups": [{"name": "mlp", "paths": ["*.down"], "lr": 0.01, "weight_decay": 0.0}],
        "schedule": {"kind": "linear", "warmup_steps": 1, "decay_steps": 10},
    },
    "adamw8bit": {"kind": "adamw8bit", "lr": 0.003},
    "sgd": {"kind": "sgd", "lr": 0.1, "nesterov": True, "decay": "hidden", "weight_decay": 0.01},
}


def written(folder: Path, optimizer: dict[str, Any]) -> Path:
    plain = tomllib.loads(tiny.SPEC)
    plain["phases"] = [{**plain["phases"][0], "optimizers": [optimizer]}]
    del plain["evaluation"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.json"
    path.write_text(json.dumps(plain))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_run_is_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    spec = written(tmp_path, KINDS[kind])
    assert tiny.run(spec, tmp_path / "whole").code == 0
    assert tiny.run(spec, tmp_path / "half", phases__sft__steps=2).code == 0
    continued = tiny.run(spec, tmp_path / "half", "--resume")
    assert (continued.code, continued.err) == (0, "")
    assert tiny.state(tmp_path / "half") == tiny.state(tmp_path / "whole")
    losses = [line["train/loss"] for line in tiny.lines(tmp_path / "whole/metrics.jsonl")]
    assert losses[-1] < losses[0]


def test_another_optimizer_is_another_run(tmp_path: Path) -> None:
    assert tiny.run(written(tmp_path, KINDS["sgd"]), tmp_path / "out", phases__sft__steps=2).code == 0
    refused = tiny.run(written(tmp_path, KINDS["adamw8bit"]), tmp_path / "out", "--resume")
    assert refused.code == 2
    assert 'phases.sft.optimizers.actor.kind was "sgd" and is now "adamw8bit"' in refused.err
    accepting = ("--resume", "--accept", "optimizers")
    for other in (KINDS["adamw8bit"], {**KINDS["sgd"], "momentum": 0.0, "nesterov": False}):
        refused = tiny.run(written(tmp_path, other), tmp_path / "out", *accepting)
        assert refused.code == 2 and refused.err.startswith(
            "error: accept: phases.sft.optimizers.actor keeps something else of past gradients than the one before; "
        )
    accepted = tiny.run(written(tmp_path, {**KINDS["sgd"], "lr": 0.01}), tmp_path / "out", *accepting)
    assert (accepted.code, accepted.err) == (0, "")


def test_a_dry_run_says_what_moves_how_much(tmp_path: Path) -> None:
    """Embedding 259 x 32 and five norms of 32 and four of 16; qkv 64 x 32, o 32 x 32, gate_up 128 x 32 in each of two layers."""
    done = tiny.run(written(tmp_path, KINDS["muon"]), tmp_path / "out", "--dry-run")
    muon, adamw, down = 2 * (64 + 32 + 128) * 32, 259 * 32 + 5 * 32 + 4 * 16, 2 * 32 * 64
    assert done.code == 0
    for words in (f"muon ({muon:,} parameters)", f"adamw ({adamw:,} parameters)", f"mlp ({down:,} parameters)"):
        assert words in done.out
