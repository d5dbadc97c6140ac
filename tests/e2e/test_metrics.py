"""The names that runs of token models report are those of the table, each algorithm its own, and every one is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from e2e import tiny

from areno_fn.contracts.metrics import METRICS, NAMED_METRICS, meaning

UPDATED = {"train/loss", "train/entropy", "train/tokens", "train/grad_norm", "train/lr"}
SURROGATE = {
    "train/policy_loss",
    "train/ratio_mean",
    "train/ratio_std",
    "train/ratio_max",
    "train/clip_fraction",
    "train/clip_fraction_low",
    "train/importance_mean",
    "train/importance_max",
    "train/logp_diff_mean",
    "train/logp_diff_max",
}
DRAWN = {name for name in METRICS if name.startswith("rollout/")} - {"rollout/kl", "rollout/kl_coef"}
TIMED = {"time/rollout", "time/reward", "time/train"}
SAMPLED = UPDATED | SURROGATE | DRAWN | TIMED | {"reward/short"}
RECALLED = {"train/kl", "time/score"}
CRITIC = {name for name in METRICS if name.startswith("critic/")}
PAIRS = {name for name in METRICS if name.startswith("dpo/")}
NAMES: dict[str, set[str]] = {
    "sft": UPDATED,
    "dpo": UPDATED | PAIRS | {"time/score"},
    "grpo": SAMPLED,
    "grpo_kl": SAMPLED | RECALLED,
    "gspo": SAMPLED | RECALLED,
    "rloo": SAMPLED | RECALLED | {"rollout/kl", "rollout/kl_coef"},
    "ppo": SAMPLED | RECALLED | CRITIC | {"rollout/kl", "rollout/kl_coef"},
}
"""What a step of each reports, beside `time/step`, and `time/checkpoint` where a checkpoint was written before it."""


def phase(name: str, algorithm: dict[str, Any], data: dict[str, Any], **more: Any) -> dict[str, Any]:
    rewards = [{"function": "areno_fn.world.rewards:length_penalty", "name": "short"}]
    drawn = {"rewards": rewards} if name not in ("sft", "dpo") else {}
    batch = {"rows": 2, "max_length": 16}
    return {"name": name, "steps": 2, "algorithm": algorithm, "data": [data], "batch": batch, **drawn, **more}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[set[str]]]:
    """The names in every line of a run that takes two steps of each algorithm, by phase."""
    folder = tmp_path_factory.mktemp("metrics")
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{n}+", "chosen": "ab", "rejected": "c"}) + "\n" for n in range(4)))
    sums = {"kind": "arithmetic", "digits": 1, "count": 8}
    common = {"samples": 2, "sampling": {"max_tokens": 3}}
    roles = [{"kind": "adamw", "role": role} for role in ("actor", "critic")]
    phases = [
        phase("sft", {"kind": "sft"}, sums),
        phase("dpo", {"kind": "dpo"}, {"kind": "jsonl", "path": str(pairs)}),
        phase("grpo", {"kind": "grpo", **common}, sums),
        phase("grpo_kl", {"kind": "grpo", "kl_coef": 0.1, "importance_cap": 2.0, **common}, sums),
        phase("gspo", {"kind": "gspo", "kl_coef": 0.1, "importance_cap": 2.0, **common}, sums),
        phase(
            "rloo",
            {"kind": "grpo", "baseline": "leave_one_out", "scale": "none", "kl_coef": 0.1, "kl_in": "reward", **common},
            sums,
        ),
        phase("ppo", {"kind": "ppo", "kl_coef": 0.1, **common}, sums, optimizers=roles),
    ]
    done = tiny.run(
        tiny.write_spec(folder), folder / "out", model__config__num_hidden_layers=1, phases=phases, checkpoint__every=1
    )
    assert (done.code, done.err) == (0, "")
    found: dict[str, list[set[str]]] = {}
    for line in tiny.lines(folder / "out/metrics.jsonl"):
        found.setdefault(line["phase"], []).append(set(line) - {"step", "phase", "time"})
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reports_exactly_the_names_of_its_algorithm(name: str, reported: dict[str, list[set[str]]]) -> None:
    steps = [names for names in reported[name] if "time/step" in names]
    assert len(steps) == 2
    for names in steps:
        assert names - {"time/step", "time/checkpoint"} - {n for n in names if n.startswith("eval/")} == NAMES[name]


def test_every_name_of_the_table_is_reported_and_every_name_reported_has_a_meaning(
    reported: dict[str, list[set[str]]],
) -> None:
    every = {name for lines in reported.values() for names in lines for name in names}
    of_tokens = {name for name in METRICS if not name.startswith(("flow/", "fake/", "surrogate/"))}
    assert every - {n for n in every if n.startswith(tuple(NAMED_METRICS))} == of_tokens
    assert all(meaning(name) for name in every)
