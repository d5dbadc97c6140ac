"""Runs on preferences: where they start, that they learn, and that stopping, adapters and epochs change nothing."""

from __future__ import annotations

import io
import math
from pathlib import Path

import attrs
import pytest
import torch
from e2e import tiny

from areno_fn import tree
from areno_fn.contracts.batch import PackedTokens
from areno_fn.contracts.state import TrainState
from areno_fn.engine import specfile
from areno_fn.engine.loop import train
from areno_fn.engine.plan import plan
from areno_fn.engine.recorder import Recorder
from areno_fn.engine.start import initial_state
from areno_fn.steps.recipes import ACTOR, REFERENCE
from areno_fn.world.display import PlainDisplay
from areno_fn.world.samples import SampleLog
from areno_fn.world.trackers import JsonlTracker

SPEC = tiny.ROOT / "specs/dpo.toml"
SHORT = {
    "model__config__hidden_size": 32,
    "model__config__num_hidden_layers": 1,
    "phases__sft__steps": 2,
    "phases__dpo__epochs": 2,
    "phases__dpo__batch__rows": 64,
    "phases__dpo__optimizers__0__schedule": {"kind": "constant", "warmup_steps": 2},
}


def dpo_lines(out: Path) -> list[dict[str, float]]:
    return [line for line in tiny.lines(out / "metrics.jsonl") if line["phase"] == "dpo"]


def test_the_specification_starts_at_ln_2_and_learns_the_preference(tmp_path: Path) -> None:
    done = tiny.run(SPEC, tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    first, *_, last = dpo_lines(tmp_path / "out")
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first["dpo/margin"]) < 1e-5
    assert last["train/loss"] < 0.6 and last["dpo/accuracy"] >= 0.9 and last["dpo/margin"] > 0.2
    assert last["dpo/margin"] == pytest.approx(last["dpo/chosen_reward"] - last["dpo/rejected_reward"], abs=1e-5)


@pytest.mark.parametrize("finetune", ["full", "lora"])
def test_a_stopped_run_goes_on_bit_for_bit(finetune: str, tmp_path: Path) -> None:
    """The reference is computed again for a run that goes on, and is the same."""
    changed = {**SHORT, "finetune": finetune}
    whole = tiny.run(SPEC, tmp_path / "whole", **changed)
    assert (whole.code, whole.err) == (0, "")
    lines = dpo_lines(tmp_path / "whole")
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["train/loss"] != lines[0]["train/loss"]
    tiny.run(SPEC, tmp_path / "parts", **{**changed, "phases__dpo__epochs": 1})
    again = tiny.run(SPEC, tmp_path / "parts", "--resume", **changed)
    assert (again.code, again.err) == (0, "")
    assert tiny.state(tmp_path / "whole") == tiny.state(tmp_path / "parts")


def test_every_row_meets_the_reference_once_and_the_reference_stays_the_start(tmp_path: Path) -> None:
    changes = {**SHORT, "phases__sft__steps": 1}
    spec = specfile.read(str(SPEC), tiny.changes({k.replace("__", "."): v for k, v in changes.items()})[1::2])
    ready = plan(spec)
    algorithm, refer = ready.phases[1].algorithm, ready.phases[1].algorithm.refer
    assert refer is not None
    asked: list[int] = []

    def counted(state: TrainState, packed: PackedTokens) -> torch.Tensor:
        asked.append(packed.documents)
        return refer(state, packed)

    watched = attrs.evolve(ready.phases[1], algorithm=attrs.evolve(algorithm, refer=counted))
    recorder = Recorder(
        plan=ready,
        display=PlainDisplay(io.StringIO()),
        tracker=JsonlTracker(tmp_path / "metrics.jsonl"),
        sample_log=SampleLog(tmp_path / "samples.jsonl"),
        store=lambda state: None,
    )
    last = train(attrs.evolve(ready, phases=(ready.phases[0], watched)), initial_state(ready), recorder)
    recorder.close()
    assert sum(asked) == 2 * len(ready.phases[1].pairs)
    assert not tree.equal(last.params[ACTOR], last.snapshots[REFERENCE])
