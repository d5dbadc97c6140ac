"""A run goes on though something has changed, where its user says so and nothing is lost by it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from e2e import tiny

import areno_fn as af
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.key import Key
from areno_fn.engine.specfile import read

OTHER_SEED = {"seed": 1}
OTHER_DATA = {"phases.grpo.data.0.count": 19}
FEWER_DATA = {"phases.grpo.data.0.count": 8}
OTHER_RATE = {"phases.grpo.optimizers.0.lr": 0.001}
OTHER_PHASES = {"phases.grpo.algorithm.kl_coef": 0.2}
CHANGES = {"seed": OTHER_SEED, "data": OTHER_DATA, "optimizers": OTHER_RATE, "phases": OTHER_PHASES}
EXTRA = """
[[phases]]
name = "more"
steps = 1
algorithm = { kind = "sft" }
data = [{ kind = "arithmetic", digits = 1, count = 40 }]
batch = { rows = 8, max_length = 16 }
optimizers = [{ kind = "adamw", lr = 0.003 }]

[evaluation]"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of 4 + 4 steps, with checkpoints after steps 6 and 8."""
    home = tmp_path_factory.mktemp("whole")
    assert tiny.run(tiny.write_spec(home), home / "out").code == 0
    return home / "out"


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """The same run as it was after step 6, in the middle of its second phase."""
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000008")
    return tmp_path / "out"


def resume(out: Path, values: dict[str, Any], *accept: str, spec: Path | None = None) -> tiny.Done:
    flags = [word for name in accept for word in ("--accept", name)]
    path = tiny.write_spec(out.parent) if spec is None else spec
    return tiny.in_process([str(path), "--out", str(out), "--resume", *flags, *tiny.changes(values)])


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_that_is_accepted_is_said_and_is_accepted_for_good(field: str, out: Path) -> None:
    refused = resume(out, CHANGES[field])
    assert refused.code == 2 and f", or pass --accept {field}\n" in refused.err
    done = resume(out, CHANGES[field], field)
    assert (done.code, done.err) == (0, "")
    assert f"accepted another value of {field}: " in done.out
    steps = [line["step"] for line in tiny.lines(out / "metrics.jsonl") if "time/step" in line]
    assert steps == list(range(1, 9))
    again = resume(out, CHANGES[field])
    assert (again.code, again.err) == (0, "") and "accepted another" not in again.out
    back = resume(out, {})
    assert back.code == 2 and field in back.err


def test_it_is_written_down_before_the_first_step(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("areno_fn.engine.session.train", stopped)
    assert resume(out, OTHER_RATE, "optimizers").code == 130
    monkeypatch.undo()
    assert tiny.last_checkpoint(out).name == "step-00000006"
    assert resume(out, OTHER_RATE).code == 0


def test_other_optimizers_keep_the_moments_and_move_with_the_new_rate(whole: Path, out: Path) -> None:
    before = tiny.tensors(out)
    assert resume(out, OTHER_RATE, "optimizers").code == 0
    rates = [line["train/lr"] for line in tiny.lines(out / "metrics.jsonl") if "train/lr" in line]
    assert rates == pytest.approx([0.003] * 6 + [0.001] * 2)
    after = tiny.tensors(out)
    (count,) = (name for name in before if name.startswith("optim") and name.endswith("1.count"))
    assert (int(before[count]), int(after[count])) == (4, 8)


def test_another_seed_names_what_is_drawn_from_here_on(whole: Path, out: Path) -> None:
    assert resume(out, OTHER_SEED, "seed").code == 0
    assert int(tiny.tensors(out)["key.seed"]) == int(Key.of(1).seed)
    mine, others = (tiny.untimed(folder / "metrics.jsonl") for folder in (out, whole))
    assert [a == b for a, b in zip(mine, others, strict=True) if "train/loss" in a] == [True] * 6 + [False] * 2


@pytest.mark.parametrize(("values", "place"), [(OTHER_DATA, (0, 4)), (FEWER_DATA, (2, 0))])
def test_other_rows_are_read_from_the_same_place_or_the_next_epoch(
    values: dict[str, Any], place: tuple[int, int], out: Path
) -> None:
    """After two of five batches: the third and fourth of the new rows, or an epoch of the two that there are."""
    assert resume(out, values, "data").code == 0
    scalars = read_manifest(tiny.last_checkpoint(out)).values.scalars
    assert (scalars["cursor.epoch"], scalars["cursor.batch"]) == place


def test_a_complete_run_goes_on_with_fewer_rows(whole: Path, tmp_path: Path) -> None:
    """It stands behind four of five batches, and there are two now: the fifth step begins an epoch."""
    shutil.copytree(whole, tmp_path / "out")
    done = resume(tmp_path / "out", {**FEWER_DATA, "phases.grpo.steps": 5}, "data")
    assert (done.code, done.err) == (0, "")
    scalars = read_manifest(tiny.last_checkpoint(tmp_path / "out")).values.scalars
    assert (scalars["cursor.step"], scalars["cursor.epoch"], scalars["cursor.batch"]) == (5, 1, 1)


def test_a_phase_may_be_added_behind_a_complete_run(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    spec = tiny.write_spec(tmp_path, tiny.SPEC.replace("\n[evaluation]", EXTRA))
    done = resume(tmp_path / "out", {}, "phases", "data", "optimizers", spec=spec)
    assert (done.code, done.err) == (0, "")
    assert tiny.last_checkpoint(tmp_path / "out").name == "step-00000009"
    assert [line["phase"] for line in tiny.lines(tmp_path / "out" / "metrics.jsonl") if line["step"] == 9] == [
        "more"
    ] * 2


def test_a_phase_may_be_added_behind_an_interrupted_one(out: Path) -> None:
    spec = tiny.write_spec(out.parent, tiny.SPEC.replace("\n[evaluation]", EXTRA))
    assert resume(out, {}, "phases", "data", "optimizers", spec=spec).code == 0
    assert tiny.last_checkpoint(out).name == "step-00000009"


def refused(done: tiny.Done, *words: str) -> None:
    assert done.code == 2, done.out + done.err
    (sentence,) = done.err.splitlines()
    for word in words:
        assert word in sentence, sentence


def test_what_would_lose_something_is_refused_all_the_same(out: Path) -> None:
    before = tiny.files(out)
    renamed = tiny.write_spec(out.parent, tiny.SPEC.replace('name = "sft"', 'name = "first"'), "renamed.toml")
    refused(
        resume(out, {}, "phases", "optimizers", spec=renamed),
        "the run has begun the phases sft, grpo, and they would now be first, grpo; only phases behind them may be",
    )
    shorter = {"phases.grpo.steps": 1, "phases.grpo.algorithm.clip_low": 0.1}
    refused(resume(out, shorter, "phases"), "phases.grpo: 2 of its steps are done, so it cannot be cut to 1")
    refused(
        resume(out, {"phases.grpo.algorithm.kl_coef": 0.0}, "phases"),
        "accept: the phase grpo has begun with the snapshots reference, and would now keep no snapshot; a snapshot is taken",
    )
    refused(
        resume(out, {"phases.grpo.ema": "{}"}, "phases"),
        "the phase grpo has begun with the snapshots reference, and would now keep the snapshots reference and ema; ",
    )
    refused(resume(out, {"seed": 1, **OTHER_DATA}, "data"), "seed was 0 and is now 1", "or pass --accept seed")
    (out / "spec.yaml").unlink()
    refused(resume(out, OTHER_PHASES, "phases"), "'phases' cannot be accepted without the spec.yaml of the run")
    after = tiny.files(out)
    assert {name for name in before if before[name] != after.get(name)} == {"spec.yaml"}


def test_what_a_state_still_holds_of_a_phase_before_is_kept_too(whole: Path, tmp_path: Path) -> None:
    """Behind the last phase, and between two phases, a state holds the snapshots and moments of the phase before."""
    shutil.copytree(whole, tmp_path / "out")
    spec = tiny.write_spec(tmp_path, tiny.SPEC.replace("\n[evaluation]", EXTRA))
    without, sgd = {"phases.grpo.algorithm.kl_coef": 0.0}, {"phases.grpo.optimizers": '[{"kind": "sgd"}]'}
    everything = ("phases", "data", "optimizers")
    refused(resume(tmp_path / "out", without, *everything, spec=spec), "the phase grpo has begun with the snapshots")
    refused(resume(tmp_path / "out", sgd, *everything, spec=spec), "phases.grpo.optimizers.actor keeps something else")


@pytest.mark.parametrize("field", ["model", "family", "parameters", "daat"])
def test_some_fields_are_never_accepted(field: str, out: Path) -> None:
    refused(
        resume(out, {}, field),
        f"accept: '{field}' cannot be accepted, ",
        "; what can be is phases, data, optimizers, seed",
    )


def test_another_model_is_refused_with_whatever_is_accepted(out: Path) -> None:
    done = resume(out, {"model.config.intermediate_size": 48, **OTHER_SEED}, "seed", "phases", "data", "optimizers")
    refused(
        done, "model.config.intermediate_size was 64 and is now 48; resume with the specification it was started with"
    )
    assert "--accept" not in done.err


def test_accepting_is_for_continuing_alone(tmp_path: Path) -> None:
    spec = tiny.write_spec(tmp_path)
    refused(tiny.in_process([str(spec), "--accept", "data"]), "use it with resume alone")
    with pytest.raises(SpecError, match="use it with resume alone"):
        af.train(read(spec), accept=("data",))


def test_a_dry_run_says_what_would_be_refused_and_changes_nothing(out: Path) -> None:
    before = tiny.files(out)
    words = [str(tiny.write_spec(out.parent)), "--out", str(out), "--resume", "--dry-run", "--set", "seed=1"]
    refused(tiny.in_process(words), "seed was 0 and is now 1")
    assert tiny.in_process([*words, "--accept", "seed"]).code == 0
    assert tiny.files(out) == before


def test_the_function_takes_it_too(out: Path) -> None:
    spec = read(tiny.write_spec(out.parent), [f"out={out}", "seed=1"])
    assert af.train(spec, resume=True, accept=("seed",)) == 0
