"""What is said of variants in a specification, and what is checked of a stored snapshot before it is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from e2e import tiny

from areno_fn import tree
from areno_fn.ckpt.resume import load_state, save_state
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.errors import CheckpointError, SpecError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import RunSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.engine import specfile
from areno_fn.engine.composition import check_composition
from areno_fn.engine.plan import plan
from areno_fn.steps.recipes import ACTOR
from areno_fn.steps.variants import AVERAGE, SEEN, averaging

IDENTITY = RunIdentity(family="a", model="b", phases="c", data="d", parameters="e", optimizers="f", seed=1)


def said(sft: dict[str, Any] | None = None, grpo: dict[str, Any] | None = None, **algorithm: Any) -> list[str]:
    """What is wrong with the tiny specification when its phases say this too."""
    table = tomllib.loads(tiny.SPEC)
    table["phases"][0].update(sft or {})
    table["phases"][1].update(grpo or {})
    table["phases"][1]["algorithm"].update(algorithm)
    try:
        check_composition(msgspec.convert(table, RunSpec))
    except SpecError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "sound",
    [
        {"grpo": {"ema": {}, "offload": ["reference", "ema"]}, "reference_every": 3},
        {"grpo": {"ema": {"schedule": "linear", "ramp": 2, "evaluate": False}}},
        {"sft": {"ema": {"export": False}, "offload": ["ema"]}},
    ],
)
def test_sound_variants_pass(sound: dict[str, Any]) -> None:
    assert said(**sound) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"reference_every": 3, "kl_coef": 0.0},
            "phases.grpo.algorithm.reference_every: without kl_coef there is no reference to renew; give kl_coef, or remove this",
        ),
        (
            {"sft": {"offload": ["reference"]}},
            "phases.sft.offload: this phase keeps no 'reference'; it keeps no snapshot",
        ),
        ({"grpo": {"offload": ["ema"]}}, "phases.grpo.offload: this phase keeps no 'ema'; it keeps 'reference'"),
        (
            {"grpo": {"offload": ["reference", "reference"]}},
            "phases.grpo.offload.1: 'reference' is there twice; name it once",
        ),
        (
            {"sft": {"ema": {}}},
            "phases.sft.ema.export: an average ends with its phase, and only the last one's is there to export; "
            "set export = false",
        ),
        (
            {"grpo": {"ema": {"evaluate": False, "export": False}}},
            "phases.grpo.ema: it is neither exported nor evaluated; set `export`, or `evaluate` with an `evaluation`, "
            "or remove this",
        ),
        (
            {"grpo": {"ema": {"schedule": "linear"}}},
            "phases.grpo.ema.ramp: the schedule 'linear', and no other, needs a ramp of at least 1 update",
        ),
        (
            {"grpo": {"ema": {"ramp": 5}}},
            "phases.grpo.ema.ramp: the schedule 'linear', and no other, needs a ramp of at least 1 update",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(wrong: dict[str, Any], sentence: str) -> None:
    assert said(**wrong) == [sentence]


def state() -> TrainState:
    params = {ACTOR: {"w": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(3)}}
    fresh = TrainState(params=params, optim={}, snapshots={}, counters=Counters(), key=Key.of(0), cursor=Cursor())
    return averaging(fresh)


def with_average(change: Any) -> TrainState:
    whole = state()
    return replace(whole, snapshots={AVERAGE: change(whole.snapshots[AVERAGE])})


WRONG = {
    "a leaf more": (
        with_average(lambda average: {**average, "new": torch.zeros(1)}),
        r"'snapshots\.ema\.new' is missing, it should be float32 \[1\]",
    ),
    "a leaf less": (with_average(lambda average: {"w": average["w"]}), r"'snapshots\.ema\.b' is not expected"),
    "another shape": (
        with_average(lambda average: {**average, "w": average["w"].T}),
        r"'snapshots\.ema\.w' is float32 \[2, 3\], it should be float32 \[3, 2\]",
    ),
    "another dtype": (
        with_average(lambda average: {**average, "w": average["w"].bfloat16()}),
        r"'snapshots\.ema\.w' is float32 \[2, 3\], it should be bfloat16 \[2, 3\]",
    ),
    "no average": (replace(state(), snapshots={}), r"'snapshots\.ema\.w' is not expected"),
    "no counts": (replace(state(), controls={}), r"'controls\.ema_steps' is not expected"),
    "another count": (
        replace(state(), controls={**state().controls, SEEN: 0.5}),
        r"'controls\.ema_steps' is the int 0, it should be the float 0\.5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_stored_average_is_compared_before_a_tensor_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_state(tmp_path, 1, state(), IDENTITY)
    like, words = WRONG[name]
    read: list[Any] = []
    monkeypatch.setattr(Reader, "fill", lambda *given: read.append(given))
    blank = tree.map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, like)
    with pytest.raises(CheckpointError, match=words):
        load_state(folder, blank, IDENTITY)
    assert not read


def test_a_stored_average_comes_back_with_its_counts(tmp_path: Path) -> None:
    moved = replace(
        with_average(lambda average: tree.map(lambda x: x / 3, average)), controls={**state().controls, SEEN: 5}
    )
    folder = save_state(tmp_path, 1, moved, IDENTITY)
    assert tree.equal(load_state(folder, state(), IDENTITY), moved)


def test_what_is_done_with_snapshots_is_no_part_of_a_run_and_what_they_are_is(tmp_path: Path) -> None:
    """So a run may go on with them away, or with its average evaluated no more, but not with another average."""

    path = str(tiny.write_spec(tmp_path))

    def identity(*changes: str) -> RunIdentity:
        return plan(specfile.read(path, changes)).identity

    usual = identity('phases.grpo.ema={"decay": 0.9}')
    assert usual == identity('phases.grpo.ema={"decay": 0.9, "evaluate": false}', 'phases.grpo.offload=["ema"]')
    for other in (
        "{}",
        '{"decay": 0.9, "every": 2}',
        '{"decay": 0.9, "start": 1}',
        '{"decay": 0.9, "schedule": "constant"}',
    ):
        assert list(usual.differences(identity(f"phases.grpo.ema={other}"))) == ["phases"]
