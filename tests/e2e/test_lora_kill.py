"""A run that trains adapters against a reference, saves at every step and keeps one state, dies and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e import tiny
from e2e.test_kill import Killed, die_after

SPEC = tiny.ROOT / "specs/lora.toml"
VALUES: dict[str, Any] = {
    "phases__sft__steps": 3,
    "phases__grpo__steps": 3,
    "phases__grpo__rewards__0__function": "areno_fn.world.rewards:length_penalty",
    "evaluation__limit": 4,
    "checkpoint__every": 1,
    "checkpoint__keep": 1,
}


def test_K16_D13_a_killed_run_with_adapters_and_a_reference_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert tiny.run(SPEC, whole, **VALUES).code == 0
    for saves in (2, 3):  # in the middle of the first phase, and of the second
        die_after(monkeypatch, "save", saves)
        with pytest.raises(Killed):
            tiny.run(SPEC, out, "--resume", **VALUES)
        monkeypatch.undo()
    assert tiny.run(SPEC, out, "--resume", **VALUES).code == 0
    assert tiny.difference(whole, out) is None
    assert tiny.files(whole / "adapter") == tiny.files(out / "adapter")
    assert [folder.name for folder in (out / "checkpoints").iterdir()] == ["step-00000006"]
