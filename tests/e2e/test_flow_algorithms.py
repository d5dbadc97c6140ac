"""Every algorithm of flow models through a run that is stopped and continued, and what is refused of their fields."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from clip_folders import write_clip
from e2e import tiny
from e2e.tiny_flow import SPEC
from remote_judge import judging

import areno_fn as af
from areno_fn.contracts.spec import DigitsData, FlowAlgorithm, FlowSFT
from areno_fn.steps.recipes import RECIPES
from areno_fn.world import digits

NOISY, PLAIN = {"steps": 4, "count": 2}, {"steps": 3, "solver": "unipc", "guidance": 1.5}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"kl_coef": 0.1, "denoising": NOISY, "draw_with": "ema"},
    "flow_grpo_guard": {"kl_coef": 0.1, "denoising": NOISY | {"window": True}, "guard_step_reweight": True},
    "flow_dppo": {"denoising": NOISY | {"dynamics": "dance_sde"}, "epochs": 2},
    "flow_nft": {"kl_coef": 0.1, "minibatches": 2, "denoising": PLAIN, "old": {"rate": 0.2}, "times": "grid"},
    "flow_awm": {"denoising": PLAIN, "ema_coef": 0.1, "combine": "each"},
    "flow_dgpo": {"denoising": PLAIN, "minibatches": 2, "draw_old": 2},
    "flow_crd": {"denoising": PLAIN},
    "flow_online_dpo": {"denoising": PLAIN, "beta": 10.0, "minibatches": 2},
    "flow_dpo": {"beta": 10.0, "terms": 2},
}
BRIGHT = {"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}
CONTRAST = {"kind": "function", "function": "areno_fn.world.picture_rewards:contrast", "weight": 0.5}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return tiny.write_spec(tmp_path, SPEC)


def values_of(kind: str, **fields: Any) -> dict[str, Any]:
    """A run whose second phase is of this algorithm, after one step of flow matching without some conditions."""
    algorithm = {"kind": kind, "samples": 4} | ALGORITHMS[kind] | fields
    values = {
        "phases__sft__steps": 1,
        "phases__sft__algorithm__condition_dropout": 0.2,
        "phases__grpo__steps": 2,
        "phases__grpo__rewards": [BRIGHT, CONTRAST],
        "phases__grpo__batch__micro_rows": 8,
        "checkpoint__every": 0,
        "evaluation__every": 0,
    }
    if kind == "flow_dpo":
        del algorithm["samples"]
        values |= {"phases__grpo__rewards": [], "phases__grpo__data": [{"kind": "digit_pairs", "limit": 20}]}
    if {"draw_with", "ema_coef"} & algorithm.keys():
        values["phases__grpo__ema"] = {"decay": 0.5, "export": False, "evaluate": False}
    return values | {"phases__grpo__algorithm": algorithm}


def test_every_algorithm_is_run() -> None:
    kinds = {
        str(kind.__struct_config__.tag) for kind in RECIPES if issubclass(kind, FlowAlgorithm) and kind is not FlowSFT
    }
    assert {kind for kind in kinds if kind in ALGORITHMS} == set(ALGORITHMS)
    assert set(ALGORITHMS) <= kinds


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_K20_a_run_continues_bit_for_bit(kind: str, spec: Path, tmp_path: Path) -> None:
    values = values_of(kind) | {"checkpoint__every": 1}
    done = tiny.run(spec, tmp_path / "whole", **values)
    assert (done.code, done.err) == (0, "")
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    shutil.rmtree(tiny.last_checkpoint(tmp_path / "out"))  # as if it had been stopped before it was written
    assert tiny.run(spec, tmp_path / "out", "--resume", **values).code == 0
    assert tiny.state(tmp_path / "whole") == tiny.state(tmp_path / "out")
    lines = [line for line in tiny.lines(tmp_path / "whole/metrics.jsonl") if "train/loss" in line]
    steps = [line for line in lines if line["phase"] == "grpo"]
    assert len(steps) == 2 and all(line["train/grad_norm"] > 0 for line in steps)
    if kind != "flow_dpo":
        assert {"reward/brightness", "reward/contrast"} <= steps[0].keys()


def test_snapshots_may_lie_on_the_host(spec: Path, tmp_path: Path) -> None:
    values = values_of("flow_crd")
    assert tiny.run(spec, tmp_path / "whole", **values).code == 0
    away = values | {"phases__grpo__offload": ["reference", "old", "sampler"]}
    assert tiny.run(spec, tmp_path / "out", **away).code == 0
    assert tiny.state(tmp_path / "whole")[0] == tiny.state(tmp_path / "out")[0]


def test_S1_the_model_without_its_adapters_is_the_reference(spec: Path, tmp_path: Path) -> None:
    """An adapter that has been trained is away from the base, where a phase begins, and not from its start."""
    assert tiny.run(spec, tmp_path / "first", **values_of("flow_grpo", kl_coef=0.0)).code == 0
    text = SPEC[: SPEC.index("[model]")] + SPEC[SPEC.index("[[phases]]") :]
    tiny.write_spec(tmp_path, text)
    found = {}
    for reference in ("start", "base"):
        values = values_of("flow_grpo", reference=reference, kl_coef=0.1, draw_with="actor") | {
            "phases__sft__steps": 2,
            "model": {"kind": "hf", "path": str(tmp_path / "first/export")},
            "finetune": {"kind": "lora", "rank": 2},
        }
        del values["phases__grpo__ema"]
        done = tiny.run(spec, tmp_path / reference, **values)
        assert (done.code, done.err) == (0, "")
        steps = [line for line in tiny.lines(tmp_path / reference / "metrics.jsonl") if "flow/kl" in line]
        found[reference] = steps[0]["flow/kl"]
    assert found["start"] == 0 < found["base"]


def test_clip_models_and_addresses_judge_a_run(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of both kinds in training and evaluation; a CLIP model of other weights, and not another address, is another run."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_clip(tmp_path / "clip")
    with judging(lambda body: [float(len(text)) for text in body["pictures"]]) as url:
        rewards = [
            {"kind": "clip", "path": str(tmp_path / "clip"), "prompt": "digit {prompt}", "name": "fit"},
            {"kind": "http", "url": url, "name": "far", "weight": 1e-4},
        ]
        values = values_of("flow_nft") | {"phases__grpo__rewards": rewards, "evaluation__rewards": rewards}
        done = tiny.run(spec, tmp_path / "out", **(values | {"phases__grpo__steps": 1}))
        assert (done.code, done.err) == (0, "")
        rewards[1] = rewards[1] | {"url": f"{url}/elsewhere"}
        assert tiny.run(spec, tmp_path / "out", "--resume", **values).code == 0
        steps = [line for line in tiny.lines(tmp_path / "out/metrics.jsonl") if "reward/fit" in line]
        assert len(steps) == 2 and -1 <= steps[0]["reward/fit"] <= 1 and steps[0]["reward/far"] > 80
        write_clip(tmp_path / "clip", seed=1)
        done = tiny.run(spec, tmp_path / "out", "--resume", **(values | {"phases__grpo__steps": 3}))
    assert done.code == 2 and "belongs to another run" in done.err


def test_an_address_that_is_silent_ends_a_run_in_one_sentence(spec: Path, tmp_path: Path) -> None:
    reward = {"kind": "http", "url": "http://127.0.0.1:9/", "retries": 0, "name": "far"}
    done = tiny.run(spec, tmp_path / "out", **(values_of("flow_nft") | {"phases__grpo__rewards": [reward]}))
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "the reward 'far' at http://127.0.0.1:9/ gave no answer in 1 attempts, at last because " in line


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("flow_grpo", {"draw_with": "ema"}, "draw_with: the phase keeps no average of the actor; give it `ema`, or remove this"),
        ("flow_awm", {"ema_coef": 0.5}, "ema_coef: the phase keeps no average of the actor; give it `ema`, or remove this"),
        (
            "flow_grpo",
            {"denoising": {"steps": 4, "noisy": [1, 4]}},
            "denoising.noisy: there is no step 4 of 4; steps are numbered from 0, or from the end by -1",
        ),
        (
            "flow_grpo",
            {"denoising": {"steps": 4, "noisy": [-1], "dynamics": "cps"}},
            "denoising.noisy: the last step of the dynamics 'cps' ends at the data and has no noise; leave it out",
        ),
        (
            "flow_dppo",
            {"denoising": {"steps": 4, "count": 4}},
            "denoising.count: 4 noisy steps cannot be chosen among 3",
        ),
        (
            "flow_dppo",
            {"denoising": {"steps": 4, "window": True}},
            "denoising.window: it needs a count of successive steps; give `count`, or remove this",
        ),
        (
            "flow_nft",
            {"times": "grid", "shift": 2.0},
            "shift: the levels of the grid are shifted by denoising.shift; remove this",
        ),
        (
            "flow_nft",
            {"times": "grid", "until": 0.2, "denoising": {"steps": 4}},
            "until: no step of 4 begins in that part of the way; raise it",
        ),
        ("flow_grpo", {"reference": "base"}, "reference: without kl_coef there is no reference; give kl_coef, or remove this"),
        (
            "flow_dgpo",
            {"reference": "base"},
            "reference: 'base' is the model without its adapters, and this run trains none; use 'start'",
        ),
        (
            "flow_dgpo",
            {"minibatches": 5},
            "minibatches: 5 mini-batches of whole groups cannot be cut from 4 prompts",
        ),
        (
            "flow_crd",
            {},
            "reference_guidance: nothing has taught digits_dit from scratch what to make without a condition; give a "
            "flow_sft phase before it a condition_dropout, or set this to 1",
        ),
        (
            "flow_crd",
            {"kl_coef": 0.0, "kl_floor": 0.01},
            "kl_floor: without kl_coef there is no distance to weigh; give kl_coef, or remove this",
        ),
        (
            "flow_dppo",
            {"threshold": 0.0, "mask_space": "mean"},
            "mask_space: with threshold = 0 a step has moved too far in any space; give threshold, or remove this",
        ),
        (
            "flow_nft",
            {"old": {"rate": 0.0}},
            "old.rate: a share that begins at 0 and stays there makes no copy that differs; give rate, or start",
        ),
        (
            "flow_online_dpo",
            {"kl_coef": 0.1},
            "kl_coef: the preference holds the actor near its reference by beta; remove this",
        ),
        (
            "flow_online_dpo",
            {"scale": "none"},
            "scale: of a group only the best and the worst count, and not by how much; remove this",
        ),
        (
            "flow_grpo",
            {"combine": "each", "scale": "batch"},
            "scale: with combine = 'each' rewards are compared within groups and scaled over the batch; remove this",
        ),
        (
            "flow_grpo",
            {"baseline": "batch"},
            "scale: a deviation from the mean of the batch cannot be divided by that of its group, which is 0 where its "
            "rewards are equal; use 'batch' or 'none'",
        ),
    ],
)  # fmt: skip
def test_fields_that_mean_nothing_are_refused(
    kind: str, values: dict[str, Any], sentence: str, spec: Path, tmp_path: Path
) -> None:
    done = tiny.run(spec, tmp_path / "out", phases__grpo__algorithm={"kind": kind, "samples": 4} | values)
    assert done.code == 2
    assert done.err.splitlines() == [f"error: phases.grpo.algorithm.{sentence}"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"phases__grpo__algorithm": {"kind": "flow_dgpo", "samples": 4}, "phases__grpo__batch__micro_rows": 3},
            "phases.grpo.batch.micro_rows: the 4 samples of a group are compared in one micro-batch; use at least 4, or 0",
        ),
        (
            {"phases__grpo__algorithm": {"kind": "flow_dgpo", "samples": 4, "minibatches": 6}, "phases__grpo__batch__rows": 8},
            "phases.grpo.algorithm.minibatches: 6 mini-batches of whole groups cannot be cut from the last batch of an epoch, "
            "which has 4 prompts (20 in batches of 8); change it or batch.rows",
        ),
        (
            {"phases__sft__data": [{"kind": "digit_pairs"}]},
            "phases.sft.data.0: flow_sft takes single pictures, and 'digit_pairs' is none of these; use digits",
        ),
        (
            {"phases__sft__algorithm": {"kind": "flow_dpo"}},
            "phases.sft.data.0: flow_dpo compares pairs of pictures, and 'digits' is none of these; use digit_pairs",
        ),
        (
            {"evaluation__data": [{"kind": "digit_pairs"}]},
            "evaluation.data.0: an evaluation draws, and of 'digit_pairs' there is nothing to draw for; use digits",
        ),
        (
            {"phases__grpo__offload": ["old"]},
            "phases.grpo.offload: this phase keeps no 'old'; it keeps 'reference'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(values: dict[str, Any], sentence: str, spec: Path, tmp_path: Path) -> None:
    done = tiny.run(spec, tmp_path / "out", **values)
    assert done.code == 2 and done.err.splitlines() == [f"error: {sentence}"]


def test_pairs_are_of_two_classes_and_named_by_their_place(spec: Path) -> None:
    named = {name.replace("__", "."): value for name, value in values_of("flow_dpo").items()}
    made = af.plan(af.read_spec(str(spec), tiny.changes(named)[1::2]))
    phase = made.phases[1]
    batch = made.medium.batch(phase.examples, [3, 7, 3], phase.spec)
    assert batch.prompts.ids.tolist() == [6, 7, 14, 15, 46, 47], "twice 3, 7 and 3 + 20, and one more"
    labels = batch.prompts.conditions.positive
    assert labels[0::2].tolist() == labels[1::2].tolist() == [phase.rows[row]["label"] for row in (3, 7, 3)]
    real = {row["picture"]: row["label"] for row in digits.rows(DigitsData())}
    for row in phase.rows:
        assert real[row["chosen"]] == row["label"] != real[row["rejected"]]
    assert len({row["rejected"] for row in phase.rows}) > 15
