"""The plan looks at everything before a weight is read, the cheap before the dear, and changes nothing."""

from __future__ import annotations

import gc
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from e2e import tiny

import areno_fn as af
from areno_fn.contracts.errors import DataError, ModelError, RewardError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import AdamWSpec, RunSpec, ScratchModel
from areno_fn.engine.model import from_scratch
from areno_fn.engine.optimizers import Trained, plan_optimizers
from areno_fn.world import tokenizer_export
from areno_fn.world.data_row import Row


def spec(table: dict[str, Any]) -> RunSpec:
    return msgspec.convert(table, RunSpec)


def set_at(table: dict[str, Any], place: str, value: Any) -> Any:
    """Sets a field and returns what stood there."""
    *way, last = place.split(".")
    inner: Any = table
    for name in way:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    before, inner[last] = inner.get(last) if isinstance(inner, dict) else inner[last], value
    return before


def test_mistakes_are_found_in_the_order_of_what_it_costs_to_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composition, device, model, tokenizer, rewards, data, evaluation (CONTRACTS 3.9)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = [
        ("phases.1.name", "sft", SpecError, "two phases are named"),
        ("device", "cuda", SpecError, "torch sees no CUDA device"),
        ("model.family", "gpt9", ModelError, "model: family: there is no 'gpt9'; those of text are llama"),
        ("model.config.vocab_size", 100, SpecError, "tokenizer: it has 259 tokens"),
        ("phases.0.batch.max_length", 64, SpecError, "is beyond the model's context"),
        ("phases.0.data", [{"kind": "jsonl", "path": "/none"}], DataError, "phases.sft.data: the data file /none"),
        (
            "phases.1.rewards",
            [{"kind": "function", "function": "none:f"}],
            RewardError,
            "phases.grpo.rewards: the reward 'none:f'",
        ),
        (
            "evaluation.rewards",
            [{"kind": "function", "function": "none:g"}],
            RewardError,
            "evaluation.rewards: the reward 'none:g'",
        ),
    ]
    table = tomllib.loads(tiny.SPEC)
    right = {place: set_at(table, place, value) for place, value, _, _ in wrong}
    for place, _, kind, words in wrong:
        with pytest.raises(kind, match=words):
            af.plan(spec(table))
        set_at(table, place, right[place])
    assert af.plan(spec(table)).device == torch.device("cpu")


def test_a_specification_made_in_python_is_checked_like_a_file() -> None:
    made = spec(tomllib.loads(tiny.SPEC))
    wrong = msgspec.structs.replace(made.phases[0], optimizers=[AdamWSpec(lr="1e-6")])  # type: ignore[arg-type]
    with pytest.raises(
        SpecError,
        match=r"phases\.sft\.optimizers\.actor\.lr must be a number above 0 and at most 1000, received the text",
    ):
        af.plan(msgspec.structs.replace(made, phases=[wrong]))


def test_a_plan_says_how_long_each_phase_is() -> None:
    table = tomllib.loads(tiny.SPEC)
    table["phases"][0] |= {"steps": 0, "epochs": 3}
    table["phases"][0]["data"][0]["count"] = 41
    plan = af.plan(spec(table))
    assert [phase.steps for phase in plan.phases] == [3 * 6, 4]  # 41 rows in batches of 8
    assert [phase.size for phase in plan.phases] == [41, 20]


@pytest.mark.parametrize(("rows", "refused"), [(8, False), (9, True), (10, False), (3, False), (1, True)])
def test_the_smallest_batch_of_an_epoch_must_fill_its_mini_batches(rows: int, refused: bool) -> None:
    """Batches of 4 prompts with 4 samples each, in 6 mini-batches: a last batch of 1 prompt has 4 sequences."""
    table = tomllib.loads(tiny.SPEC)
    table["phases"][1]["data"][0]["count"] = rows
    table["phases"][1]["algorithm"]["minibatches"] = 6
    if not refused:
        af.plan(spec(table))
        return
    with pytest.raises(
        SpecError, match="cannot be cut from the last batch of an epoch, which has 1 prompts x 4 samples"
    ):
        af.plan(spec(table))


def test_rows_too_long_may_be_dropped_and_the_epoch_is_shorter(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "a", "response": "{"b" * length}"}}\n' for length in (1, 30, 2, 30, 3)))
    table = tomllib.loads(tiny.SPEC)
    table["phases"] = [table["phases"][0]]
    table["phases"][0] |= {"steps": 0, "epochs": 1, "data": [{"kind": "jsonl", "path": str(path)}]}
    table["phases"][0]["batch"] = {"rows": 2, "max_length": 16, "overlong": "drop"}
    (phase,) = af.plan(spec(table)).phases
    assert (phase.size, phase.steps) == (3, 2)
    assert [example.row for example in phase.examples] == [0, 2, 4]


@pytest.mark.parametrize(
    ("place", "allowed", "refused", "sentence"),
    [
        (
            "phases.1.ema",
            {"every": 8},
            {"every": 9},
            "ema.every: the average would be no more than a copy, because the actor makes 8 ",
        ),
        (
            "phases.1.ema",
            {"start": 7},
            {"start": 8},
            "ema.start: the average would be no more than a copy, because the actor makes 8 ",
        ),
        (
            "phases.1.ema",
            {"every": 3, "start": 5},
            {"every": 3, "start": 6},
            "ema.start: the average would be no more than a copy",
        ),
        (
            "phases.1.optimizers.0.schedule",
            {"kind": "wsd", "warmup_steps": 2, "stable_steps": 5},
            {"kind": "wsd", "warmup_steps": 2, "stable_steps": 6},
            "optimizers.actor.schedule: the decay would begin after 8 optimizer steps, but the role makes 8 in this phase; ",
        ),
    ],
)
def test_what_would_begin_behind_the_end_of_a_phase_is_refused(
    place: str, allowed: dict[str, Any], refused: dict[str, Any], sentence: str
) -> None:
    """Four iterations of two mini-batches are eight optimizer steps."""
    table = tomllib.loads(tiny.SPEC)
    set_at(table, place, allowed)
    af.plan(spec(table))
    set_at(table, place, refused)
    with pytest.raises(SpecError) as caught:
        af.plan(spec(table))
    assert str(caught.value).startswith(f"phases.grpo.{sentence}") and "\n" not in str(caught.value)


def test_planning_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    af.plan(spec(tomllib.loads(tiny.SPEC)))
    assert list(tmp_path.iterdir()) == []


def test_bytes_do_not_take_the_place_of_a_tokenizer(tmp_path: Path) -> None:
    table = tomllib.loads(tiny.SPEC)
    model = from_scratch(msgspec.convert(table["model"], ScratchModel))
    folder = af.save_hf(tmp_path / "model", model.load(Key.of(0), torch.device("cpu")), model)
    table |= {"model": {"kind": "hf", "path": str(folder)}, "tokenizer": {"kind": "byte"}}
    assert af.plan(spec(table)).tokenizer.vocab_size == 259
    tokenizer_export.export(folder)
    assert af.plan(spec(table)).tokenizer.vocab_size == 259
    written = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(written.replace('"1": 49', '"1": 50').replace('"2": 50', '"2": 49', 1))
    with pytest.raises(
        SpecError, match="tokenizer: kind 'byte' would take the place of the tokenizer in .*model; leave"
    ):
        af.plan(spec(table))


def test_states_are_stored_in_less_only_where_parameters_are() -> None:
    table = tomllib.loads(tiny.SPEC)
    table["phases"][0]["optimizers"] = [{"kind": "adamw", "states": "stored"}]
    with pytest.raises(SpecError) as refused:
        af.plan(spec(table))
    assert str(refused.value) == (
        "phases.sft.optimizers: actor.states: 'stored' keeps moments in the dtype of the parameters, and those of this role are in "
        "float32 or wider, as moments are without it; remove this, or train parameters in bfloat16"
    )
    phase = spec(table).phases[0]
    for dtypes, sound in (((torch.float32, torch.bfloat16), True), ((torch.float16,), True), ((torch.float64,), False)):
        own = {str(place): torch.empty(2, 2, dtype=dtype, device="meta") for place, dtype in enumerate(dtypes)}
        moved = Trained(params={"actor": own}, placements={"actor": {}})
        if sound:
            assert plan_optimizers(phase, moved, 3).keys() == {"actor"}
        else:
            with pytest.raises(SpecError, match="^actor.states: 'stored' keeps"):
                plan_optimizers(phase, moved, 3)


def test_a_plan_makes_every_row_once_while_nobody_looks_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million generated rows making them twice, and going through all again and again, was most of the time."""
    made: list[bool] = []
    init = Row.__init__

    def counted(self: Row, *args: Any) -> None:
        made.append(gc.isenabled())
        init(self, *args)

    monkeypatch.setattr(Row, "__init__", counted)
    table = tomllib.loads(tiny.SPEC)
    found = af.plan(spec(table))
    assert found.evaluation is not None
    assert len(made) == sum(len(rows) for rows in (*(phase.rows for phase in found.phases), found.evaluation.rows))
    assert not any(made) and gc.isenabled()
    table["model"]["family"] = "gpt9"
    with pytest.raises(ModelError):
        af.plan(spec(table))
    assert gc.isenabled(), "it is on again behind a refusal"
    gc.disable()
    try:
        with pytest.raises(ModelError):
            af.plan(spec(table))
        assert not gc.isenabled(), "it stays off where it was off"
    finally:
        gc.enable()
