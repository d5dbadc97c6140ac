"""Rules between the fields of a specification: each refusal by its words, and what stands near it and is allowed."""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
import pytest
from e2e import tiny

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import Acquisition, CycleUnit, Feedback, LoaderKind
from areno_fn.contracts.spec import GRPO, SFT, RunSpec
from areno_fn.engine.composition import check_composition
from areno_fn.steps.recipes import RECIPES

REWARD = {"kind": "function", "function": "m:f"}


def tables() -> dict[str, Any]:
    return tomllib.loads(tiny.SPEC)


def problems(table: dict[str, Any]) -> list[str]:
    try:
        check_composition(msgspec.convert(table, RunSpec))
    except SpecError as error:
        return str(error).splitlines()
    return []


def changed(place: str, value: Any) -> list[str]:
    """What is said of the tiny specification with one field replaced; `a.0.b` is the address."""
    table = tables()
    *way, last = place.split(".")
    inner: Any = table
    for name in way:
        inner = inner[int(name)] if isinstance(inner, list) else inner.setdefault(name, {})
    inner[int(last) if isinstance(inner, list) else last] = value
    return problems(table)


def test_a_sound_specification_passes() -> None:
    assert problems(tables()) == []


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("phases.1.name", "sft", "phases: two phases are named 'sft'; names must differ"),
        (
            "phases.0.steps",
            0,
            "phases.sft: exactly one of `steps` and `epochs` must be at least 1, but neither is given",
        ),
        (
            "phases.0.epochs",
            2,
            "phases.sft: exactly one of `steps` and `epochs` must be at least 1, but both are given",
        ),
        (
            "phases.1.epochs",
            2,
            "phases.grpo.epochs: grpo generates its data, so its length is given by `steps` (rollout iterations), "
            "not by epochs",
        ),
        (
            "phases.0.rewards",
            [REWARD],
            "phases.sft.rewards: sft is dataset + none, so no reward is ever asked; remove the rewards, or put them "
            "under `evaluation`",
        ),
        (
            "phases.1.rewards",
            [],
            "phases.grpo.rewards: grpo learns from runtime rewards and needs at least one, for example { kind = "
            "'function', function = 'package.module:function' }",
        ),
        ("phases.0.data", [], "phases.sft.data: a phase needs at least one data source"),
        (
            "phases.0.optimizers",
            [],
            "phases.sft.optimizers: there must be exactly one for each trained role (actor), received none",
        ),
        (
            "phases.0.optimizers",
            [{"kind": "adamw"}] * 2,
            "phases.sft.optimizers: there must be exactly one for each trained role (actor), received actor, actor",
        ),
        (
            "phases.0.optimizers.0.role",
            "critic",
            "phases.sft.optimizers: there must be exactly one for each trained role (actor), received critic",
        ),
        (
            "phases.1.algorithm.sampling.temperature",
            0.0,
            "phases.grpo.algorithm.sampling.temperature: 0 is greedy decoding, which explores nothing; use a "
            "temperature above 0",
        ),
        (
            "phases.1.algorithm.dual_clip",
            1.0,
            "phases.grpo.algorithm.dual_clip: 1.0 is not above 1; use a number above 1, or 0 for no bound",
        ),
        (
            "phases.1.algorithm",
            {"kind": "grpo", "kl_in": "reward", "sampling": {"max_tokens": 4}},
            "phases.grpo.algorithm.kl_in: without kl_coef no KL is taken from the loss or the reward; give kl_coef, or remove this",
        ),
        (
            "phases.1.algorithm",
            {"kind": "gspo", "samples": 1, "baseline": "leave_one_out", "sampling": {"max_tokens": 4}},
            "phases.grpo.algorithm.samples: a group of 1 has no others to be compared with; use at least 2",
        ),
        (
            "phases.0.algorithm",
            {"kind": "dpo", "loss": "hinge", "label_smoothing": 0.1},
            "phases.sft.algorithm.label_smoothing: it belongs to the loss 'sigmoid'; remove it, or `loss`",
        ),
        (
            "phases.1.algorithm.samples",
            1,
            "phases.grpo.algorithm.samples: a group of 1 is its own mean, so every advantage would be 0; use at least 2",
        ),
        (
            "phases.1.batch.max_length",
            4,
            "phases.grpo.batch.max_length: 4 leaves no room for a prompt beside sampling.max_tokens = 4",
        ),
        (
            "phases.1.algorithm.minibatches",
            17,
            "phases.grpo.algorithm.minibatches: 17 mini-batches cannot be cut from 4 prompts x 4 samples",
        ),
        (
            "phases.1.steps",
            0,
            "phases.grpo.steps: it must be at least 1; grpo generates its data, and a step is a rollout iteration",
        ),
        (
            "phases.1.batch.overlong",
            "drop",
            "phases.grpo.batch.overlong: it is for rows with answers to train on, and grpo draws its answers; remove this",
        ),
        (
            "phases.1.algorithm",
            {"kind": "grpo", "kl_estimator": "k2", "sampling": {"max_tokens": 4}},
            "phases.grpo.algorithm.kl_estimator: without kl_coef no KL is taken from the loss or the reward; give kl_coef, or "
            "remove this",
        ),
        (
            "phases.0.optimizers.0.schedule",
            {"min_lr": 1e-5},
            "phases.sft.optimizers.actor.schedule.min_lr: the kind 'constant' does not decay; set kind to 'linear', 'cosine' or "
            "'wsd', or remove this",
        ),
        (
            "phases.0.optimizers.0.schedule",
            {"decay_steps": 5},
            "phases.sft.optimizers.actor.schedule.decay_steps: the kind 'constant' does not decay; set kind to 'linear', "
            "'cosine' or 'wsd', or remove this",
        ),
        *[
            (
                "phases.0.optimizers.0.schedule",
                {"kind": kind, "stable_steps": 2},
                "phases.sft.optimizers.actor.schedule.stable_steps: it belongs to the kind 'wsd'; set that, or remove this",
            )
            for kind in ("constant", "linear", "cosine")
        ],
        (
            "phases.0.optimizers.0.schedule",
            {"kind": "wsd", "warmup_steps": 1, "stable_steps": 2, "decay_steps": 3},
            "phases.sft.optimizers.actor.schedule.decay_steps: the decay is at its end after 3 steps, counted from the first of "
            "the phase, but begins after 3; use more than that",
        ),
        ("evaluation.data", [], "evaluation.data: an evaluation needs at least one data source"),
        ("evaluation.rewards", [], "evaluation.rewards: an evaluation needs at least one reward"),
        (
            "evaluation.sampling",
            {"max_tokens": 4, "temperature": 0.0, "top_p": 0.9},
            "evaluation.sampling.top_p: at a temperature of 0 the likeliest token is taken, whatever else is left out; remove "
            "this",
        ),
        (
            "log",
            {"samples": 0, "samples_every": 2},
            "log.samples_every: with samples = 0 none is kept; give samples, or remove this",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(place: str, value: Any, sentence: str) -> None:
    assert changed(place, value) == [sentence]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("phases.1.algorithm.samples", 2),
        ("phases.1.algorithm.minibatches", 16),
        ("phases.1.batch.max_length", 5),
        ("phases.0.stop_at", 0.5),
        ("evaluation.sampling.temperature", 0.0),
    ],
)
def test_what_stands_at_the_edge_is_allowed(place: str, value: Any) -> None:
    assert changed(place, value) == []


PPO = {"kind": "ppo", "sampling": {"max_tokens": 4}}
KL = "without kl_coef no KL is taken from the loss or the reward; give kl_coef, or remove this"


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        ({}, []),
        ({"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"}, []),
        ({"kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 9}, []),
        ({"kl_in": "loss", "kl_estimator": "k3"}, [f"kl_in: {KL}", f"kl_estimator: {KL}"]),
        (
            {"kl_coef": 0.1, "kl_horizon": 9},
            ["kl_horizon: without kl_target no coefficient moves; give kl_target, or remove this"],
        ),
    ],
)
def test_what_a_critics_algorithm_would_not_read_is_refused(settings: dict[str, Any], sentences: list[str]) -> None:
    table = tables()
    table["phases"][1] |= {
        "algorithm": PPO | settings,
        "optimizers": [{"kind": "adamw"}, {"kind": "adamw", "role": "critic"}],
    }
    assert problems(table) == [f"phases.grpo.algorithm.{sentence}" for sentence in sentences]
    table["export"] = {"roles": ["critic", "critic"]}
    assert problems(table)[-1] == "export.roles.1: 'critic' is there twice; name it once"


def test_a_group_of_one_is_allowed_where_no_group_is_compared() -> None:
    table = tables()
    table["phases"][1]["algorithm"] |= {"samples": 1, "baseline": "batch", "scale": "batch", "minibatches": 1}
    assert problems(table) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"baseline": "batch", "scale": "group"},
            "phases.grpo.algorithm.scale: a deviation from the mean of the batch cannot be divided by that of its group, "
            "which is 0 where its rewards are equal; use 'batch' or 'none'",
        ),
        (
            {"kl_coef": 0.1, "kl_estimator": "k1"},
            "phases.grpo.algorithm.kl_estimator: the gradient of 'k1' in the loss does not depend on the reference, and holds "
            "nothing near it; use 'k3' or 'k2', or kl_in = 'reward'",
        ),
        (
            {"scale": "none", "samples": 1, "minibatches": 1},
            "phases.grpo.algorithm.samples: a group of 1 is its own mean, so every "
            "advantage would be 0; use at least 2",
        ),
    ],
)
def test_L12_what_teaches_nothing_is_refused(changes: dict[str, Any], sentence: str) -> None:
    table = tables()
    table["phases"][1]["algorithm"] |= changes
    assert problems(table) == [sentence]


@pytest.mark.parametrize(("kind", "usual"), [("grpo", "0.2"), ("gspo", "0.0004"), ("ppo", "0.2")])
def test_a_bound_of_the_ratio_is_how_far_above_1_it_is(kind: str, usual: str) -> None:
    table = tables()
    phase = table["phases"][1]
    phase["algorithm"] = {"kind": kind, "clip_high": 0.99, "sampling": {"max_tokens": 4}}
    if kind == "ppo":
        phase["optimizers"] = [{"kind": "adamw"}, {"kind": "adamw", "role": "critic"}]
    assert problems(table) == []
    phase["algorithm"]["clip_high"] = 1.28
    assert problems(table) == [
        "phases.grpo.algorithm.clip_high: the ratio is clipped at 1 + clip_high, which would be 2.28; give how far above 1 that "
        f"is, a number below 1, for example {usual}"
    ]
    phase["algorithm"]["clip_high"] = 1.0
    assert len(problems(table)) == 1


def test_a_phase_that_stops_at_a_score_needs_scores_on_the_way() -> None:
    table = tables()
    table["phases"][0]["stop_at"] = 0.5
    sentence = "phases.sft.stop_at: a phase can only stop at a score when `evaluation.every` is at least 1"
    table["evaluation"]["every"] = 0
    assert problems(table) == [sentence]
    del table["evaluation"]
    assert problems(table) == [sentence]


def test_every_problem_is_told_at_once_in_the_order_of_the_specification() -> None:
    table = tables()
    table["phases"][0]["steps"] = 0
    table["phases"][1]["rewards"] = []
    table["evaluation"]["data"] = []
    assert [line.split(":")[0] for line in problems(table)] == ["phases.sft", "phases.grpo.rewards", "evaluation.data"]


def test_a_share_of_what_does_not_count_is_refused() -> None:
    table = tables()
    phase = table["phases"][1]
    phase["algorithm"] = {"kind": "ppo", "gamma": 0.0, "sampling": {"max_tokens": 4}}
    phase["optimizers"] = [{"kind": "adamw"}, {"kind": "adamw", "role": "critic"}]
    assert problems(table) == []
    phase["algorithm"]["lam"] = 0.5
    assert problems(table) == [
        "phases.grpo.algorithm.lam: with gamma = 0 nothing that is later counts, by whatever share; give gamma, or remove this"
    ]


def test_how_evaluations_draw_is_said_where_it_is_read() -> None:
    table = tables()
    table["evaluation"]["denoising"] = {"steps": 3}
    table["phases"][0]["denoising"] = {"steps": 4}
    assert problems(table) == []
    table["phases"][1]["denoising"] = {"steps": 4}
    assert problems(table) == [
        "evaluation.denoising: every phase says itself how its evaluations draw; remove this, or that of a phase"
    ]


def test_C1_C2_an_algorithm_and_its_recipe_declare_one_contract() -> None:
    for spec, acquisition, feedback, unit, loader in (
        (SFT, Acquisition.DATASET, Feedback.NONE, CycleUnit.DATA_EPOCH, LoaderKind.DISTRIBUTED_EPOCH),
        (
            GRPO,
            Acquisition.GENERATION,
            Feedback.RUNTIME_REWARD,
            CycleUnit.ROLLOUT_ITERATION,
            LoaderKind.GROUPED_ROLLOUT,
        ),
    ):
        contract = spec.execution
        assert RECIPES[spec].execution is contract
        assert (contract.acquisition, contract.feedback) == (acquisition, feedback)
        assert (contract.cycle_unit, contract.loader_kind) == (unit, loader)


@pytest.mark.parametrize("where", ["phases.1.algorithm.sampling", "evaluation.sampling"])
def test_a_temperature_that_float32_cannot_divide_by(where: str) -> None:
    said = where.replace("phases.1", "phases.grpo")
    assert changed(f"{where}.temperature", 1e-6) == []
    assert changed(f"{where}.temperature", 1e-30) == [
        f"{said}.temperature: 1e-30 is so close to 0 that logits divided by it overflow; "
        f"use at least 1e-06, or 0 for greedy decoding"
    ]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("phases.0.optimizers.0.max_grad_norm", "phases.sft.optimizers.actor.max_grad_norm"),
        ("phases.1.algorithm.dual_clip", "phases.grpo.algorithm.dual_clip"),
        ("model.config.initializer_range", "model.config.initializer_range"),
    ],
)
def test_numbers_that_do_not_fit_32_bits(address: str, said: str) -> None:
    assert changed(address, 3.4e38) == []
    assert changed(address, 1e39) == [f"{said}: 1e+39 is beyond the largest number of 32 bits, about 3.4e+38"]
    assert changed(address, 1e-39) == [
        f"{said}: 1e-39 is nearer to 0 than the smallest number of 32 bits, about 1.2e-38, and would be taken for 0"
    ]
