"""The loop with steps that only note what they were given: order, cadence, counters, and where a stopped run goes on."""

from __future__ import annotations

import io
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch
from e2e import judges, tiny

import areno_fn as af
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import RunSpec
from areno_fn.contracts.state import TrainState
from areno_fn.engine.loop import train
from areno_fn.engine.phases import PhasePlan
from areno_fn.engine.plan import Plan
from areno_fn.engine.recorder import Recorder
from areno_fn.engine.start import initial_state
from areno_fn.steps.recipes import Algorithm
from areno_fn.testing.purity import copied
from areno_fn.world.display import PlainDisplay
from areno_fn.world.samples import SampleLog


class Notes:
    """A tracker and a store that keep what they are given."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.saved: list[TrainState] = []

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        self.events.append(f"{'step' if 'time/step' in metrics else 'evaluation'} {step} {phase}")

    def close(self) -> None:
        pass

    def store(self, state: TrainState) -> None:
        self.events.append(f"save {state.cursor.total}")
        self.saved.append(copied(state))  # the run hands its own over, and its steps write to it


def planned(**tables: Any) -> Plan:
    judges.prepare()
    table = tomllib.loads(tiny.SPEC)
    table["evaluation"]["rewards"] = [{"kind": "function", "function": "e2e.judges:evaluation"}]
    table["phases"][1]["rewards"] = [{"kind": "function", "function": "e2e.judges:training"}]
    return af.plan(msgspec.convert(table | tables, RunSpec))


def run(plan: Plan, folder: Path, stop_after: int | None = None, start: TrainState | None = None) -> Notes:
    """Runs with a recorder that takes notes, until so many steps are done."""
    notes = Notes()
    log = SampleLog(folder / "samples.jsonl")
    recorder = Recorder(
        plan=plan, display=PlainDisplay(io.StringIO()), tracker=notes, sample_log=log, store=notes.store
    )

    def stop() -> bool:
        return sum(event.startswith("step") for event in notes.events) == stop_after

    try:
        train(plan, start or initial_state(plan), recorder, stop)
    except ZeroDivisionError:
        notes.events.append("failed")
    finally:
        recorder.close()
    return notes


def noting(plan: Plan, seen: list[list[int]]) -> Plan:
    """The plan with phases whose steps note the rows of their batch and change nothing."""

    def quiet(phase: PhasePlan) -> PhasePlan:
        def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, float]]:
            rows = [int(row) for micro in batch for row in micro.tokens[micro.positions == 1]]
            seen.append(sorted(rows))
            return replace(state, counters=state.counters.advance_optimizer()), {"train/loss": 1.0}

        return attrs.evolve(phase, algorithm=Algorithm(begin=lambda state: state, sample=None, step=step))

    return attrs.evolve(plan, phases=tuple(quiet(phase) for phase in plan.phases), evaluation=None)


def counted(tmp_path: Path, rows: int, batch: int, epochs: int) -> Plan:
    """A supervised phase on `rows` rows whose second token is 65 + the row's number."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{chr(65 + row)}", "response": "x"}}\n' for row in range(rows)))
    phase = tomllib.loads(tiny.SPEC)["phases"][0]
    del phase["steps"]
    phase |= {
        "epochs": epochs,
        "data": [{"kind": "jsonl", "path": str(path)}],
        "batch": {"rows": batch, "max_length": 16},
    }
    return planned(phases=[phase])


EVERYTHING = [
    "evaluation 0 sft", "step 1 sft", "step 2 sft", "evaluation 2 sft", "save 2", "step 3 sft", "step 4 sft",
    "evaluation 4 sft", "save 4",
    "evaluation 4 grpo", "step 5 grpo", "step 6 grpo", "evaluation 6 grpo", "save 6", "step 7 grpo", "step 8 grpo",
    "evaluation 8 grpo", "save 8",
]  # fmt: skip


def test_evaluations_before_between_and_after_and_a_checkpoint_behind_each(tmp_path: Path) -> None:
    notes = run(planned(), tmp_path)
    assert notes.events == EVERYTHING
    assert judges.calls["evaluation"] == 5  # the one between the phases is made once and told twice


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_stop_is_a_checkpoint_and_the_rest_is_what_would_have_come(steps: int, tmp_path: Path) -> None:
    plan = planned()
    first = run(plan, tmp_path, stop_after=steps)
    assert first.events[-1] == f"save {steps}"
    second = run(plan, tmp_path, start=first.saved[-1])
    extra = [f"save {steps}"] if steps % 2 else []
    assert [event for event in first.events + second.events if event not in extra] == EVERYTHING


def test_C3_C4_C6_each_clock_is_advanced_by_its_own_cycles(tmp_path: Path) -> None:
    table = tomllib.loads(tiny.SPEC)
    table["phases"][0]["batch"]["rows"] = 16  # 40 rows: 3 batches an epoch
    table["phases"][1]["data"][0]["count"] = 8  # 2 batches an epoch
    notes = run(planned(phases=table["phases"]), tmp_path)
    clocks = [attrs.asdict(state.counters) for state in notes.saved]
    assert clocks == [
        {"optimizer_step": 2, "rollout_iteration": 0, "data_epoch": 0},
        {"optimizer_step": 4, "rollout_iteration": 0, "data_epoch": 1},
        {"optimizer_step": 8, "rollout_iteration": 2, "data_epoch": 1},
        {"optimizer_step": 12, "rollout_iteration": 4, "data_epoch": 1},
    ]
    places = [attrs.astuple(state.cursor) for state in notes.saved]
    assert places == [(0, 2, 0, 2, 2), (1, 0, 0, 0, 4), (1, 2, 1, 0, 6), (2, 4, 2, 0, 8)]


def test_C3_a_cycle_counts_only_when_its_body_has_returned(tmp_path: Path) -> None:
    plan = planned()

    def fail(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, float]]:
        raise ZeroDivisionError

    broken = attrs.evolve(plan.phases[1].algorithm, step=fail)
    phases = (plan.phases[0], attrs.evolve(plan.phases[1], algorithm=broken))
    notes = run(attrs.evolve(plan, phases=phases), tmp_path)
    assert notes.events[-2:] == ["evaluation 4 grpo", "failed"]
    assert notes.saved[-1].counters.rollout_iteration == 0


def test_C7_a_generating_step_draws_then_asks_then_learns(tmp_path: Path) -> None:
    plan, order = planned(), []
    algorithm = plan.phases[1].algorithm
    draw, learn = algorithm.sample, algorithm.step
    assert draw is not None

    def sample(*args: Any) -> Any:
        order.append("sample")
        return draw(*args)

    def step(state: TrainState, batch: Any) -> Any:
        order.append(f"learn after {judges.calls['training']}")
        return learn(state, batch)

    watched = attrs.evolve(plan.phases[1], algorithm=attrs.evolve(algorithm, sample=sample, step=step))
    run(attrs.evolve(plan, phases=(plan.phases[0], watched)), tmp_path)
    assert order == [word for number in range(1, 5) for word in ("sample", f"learn after {number}")]


@pytest.mark.parametrize(("rows", "batch"), [(18, 2), (7, 3), (2, 5)])
def test_D13_every_row_is_read_once_an_epoch_however_often_the_run_is_stopped(
    rows: int, batch: int, tmp_path: Path
) -> None:
    plan = counted(tmp_path, rows, batch, epochs=2)
    whole: list[list[int]] = []
    run(noting(plan, whole), tmp_path)
    per_epoch = -(-rows // batch)
    assert len(whole) == 2 * per_epoch
    for epoch in (whole[:per_epoch], whole[per_epoch:]):
        assert sorted(row for part in epoch for row in part) == list(range(65, 65 + rows))
    for first in range(1, len(whole)):
        seen: list[list[int]] = []
        noted = noting(plan, seen)
        stopped = run(noted, tmp_path, stop_after=first)
        again = run(noted, tmp_path, stop_after=1, start=stopped.saved[-1])
        run(noted, tmp_path, start=again.saved[-1])
        assert seen == whole, first


def test_D13_the_cursor_names_the_next_batch(tmp_path: Path) -> None:
    plan = noting(counted(tmp_path, rows=18, batch=2, epochs=2), [])
    places = [run(plan, tmp_path, stop_after=steps).saved[-1].cursor for steps in (1, 8, 9, 10)]
    assert [(place.epoch, place.batch) for place in places] == [(0, 1), (0, 8), (1, 0), (1, 1)]


def test_two_phases_on_the_same_rows_read_them_in_different_orders(tmp_path: Path) -> None:
    phase = tomllib.loads(tiny.SPEC)["phases"][0]
    seen: list[list[int]] = []
    run(noting(planned(phases=[phase, phase | {"name": "again"}]), seen), tmp_path)
    assert len(seen) == 8
    assert seen[:4] != seen[4:]


def test_a_phase_begins_with_fresh_moments_and_its_own_reference(tmp_path: Path) -> None:
    notes = run(planned(), tmp_path)
    between, after = notes.saved[1], notes.saved[2]
    assert attrs.astuple(between.cursor) == (1, 0, 0, 0, 4)
    assert between.snapshots == {}
    assert torch.equal(after.snapshots["reference"].embed, between.params["actor"].embed)
    assert not torch.equal(after.params["actor"].embed, between.params["actor"].embed)
    counts = [getattr(part, "count", None) for part in after.optim["actor"].inner]
    # two iterations of two mini-batches, and nothing from the phase before
    assert [int(count) for count in counts if isinstance(count, torch.Tensor)] == [4, 4]


def test_the_key_of_a_run_never_changes(tmp_path: Path) -> None:
    notes = run(planned(), tmp_path)
    words = {int(state.key.word()) for state in notes.saved}
    assert len(words) == 1


def test_data_sets_are_mixed_by_weight_among_the_rows_that_are_left(tmp_path: Path) -> None:
    """Of 6 rows 2 are too long; the 6 places of an epoch are shared 1 : 1 with 2 other rows, whose rounds go on."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    lines = [
        f'{{"prompt": "{chr(65 + row)}", "response": "{"x" * (40 if row in (1, 4) else 1)}"}}\n' for row in range(8)
    ]
    first.write_text("".join(lines[:6]))
    second.write_text("".join(lines[6:]))
    phase = tomllib.loads(tiny.SPEC)["phases"][0] | {
        "steps": 6,
        "data": [{"kind": "jsonl", "path": str(path), "weight": 0.5} for path in (first, second)],
        "batch": {"rows": 3, "max_length": 16, "overlong": "drop"},
    }
    seen: list[list[int]] = []
    plan = noting(planned(phases=[phase]), seen)
    assert plan.phases[0].mixed == ((4, 3), (2, 3))
    run(plan, tmp_path)
    epochs = [[chr(row) for batch in seen[start : start + 2] for row in batch] for start in (0, 2, 4)]
    assert [sum(letter in "GH" for letter in epoch) for epoch in epochs] == [3, 3, 3]
    read = "".join(letter for epoch in epochs for letter in epoch)
    assert sorted(read.count(letter) for letter in "GH") == [4, 5]
    assert sorted(read.count(letter) for letter in "ACDF") == [2, 2, 2, 3]
    assert not set(read) & set("BE")
