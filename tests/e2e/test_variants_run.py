"""Runs that keep an average, renew a reference, put snapshots away, and draw with merged weights."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny
from e2e.test_readme import blocks, run_block
from safetensors.torch import load_file

import areno_fn as af
from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.engine.derived import Derived

DPO = tiny.ROOT / "specs/dpo.toml"
PPO = tiny.ROOT / "specs/ppo.toml"
SMALL = {
    "model__config__hidden_size": 32,
    "model__config__num_hidden_layers": 1,
    "phases__sft__steps": 1,
    "phases__sft__batch__rows": 8,
    "phases__sft__data__0__count": 20,
}
PAIRS = {**SMALL, "phases__dpo__data__0__limit": 48}
JUDGED = {"evaluation__rewards": [{"function": f"{__name__}:digest_of", "name": "digest"}]}
"""Evaluations that tell any two sets of completions apart."""
FAST = {"phases__grpo__optimizers__actor__lr": 0.05}
"""A rate at which the likeliest completions are others after two steps."""
WATCHED = {"finetune": {"kind": "lora", "merge_rollouts": True}}


def digest_of(rows: Sequence[Any], completions: Sequence[str]) -> list[float]:
    """A number for every completion."""
    return [int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 2**24 for text in completions]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return tiny.write_spec(tmp_path)


def done(spec: Path, out: Path, *flags: str, **values: Any) -> Path:
    ended = tiny.run(spec, out, *flags, **values)
    assert (ended.code, ended.err) == (0, "")
    return out


def steps_of(out: Path, phase: str) -> list[dict[str, Any]]:
    return [line for line in tiny.lines(out / "metrics.jsonl") if line["phase"] == phase and "time/step" in line]


# ------------------------------------------------------------------------------------- averages


@pytest.mark.parametrize("finetune", ["full", "lora"])
def test_the_exported_average_is_that_of_the_states_the_run_went_through(
    spec: Path, tmp_path: Path, finetune: str
) -> None:
    """From the checkpoints of every step, in float64: after `start` 2, every second step, by the usual warm-up."""
    ema = {"decay": 0.15, "every": 2, "start": 2}
    changed = {"checkpoint__every": 1, "checkpoint__keep": 99, "finetune": finetune}
    spec.write_text(re.sub(r"(?s)\[\[phases\]\]\nname = \"grpo\".*?\n\n", "", spec.read_text()))
    out = done(spec, tmp_path / "out", phases__sft__ema=ema, phases__sft__steps=7, **changed)
    expected = params_at(out, 2)
    for step, decay in ((4, 1 / 10), (6, 0.15)):  # min(0.15, 1/10), min(0.15, 2/11)
        now = params_at(out, step)
        expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
    stored = stored_at(out, 7, "snapshots.ema")
    assert stored.keys() == expected.keys() and stored
    for name, value in expected.items():
        torch.testing.assert_close(stored[name].double(), value, rtol=1e-6, atol=1e-8)
    last = params_at(out, 7)
    assert any(not torch.equal(stored[name].double(), value) for name, value in last.items())
    if finetune == "lora":
        files = load_file(out / "adapter_ema/adapter_model.safetensors")
        assert sorted(float(v.double().sum()) for v in files.values()) == sorted(
            float(v.double().sum()) for v in stored.values()
        )
        assert (out / "export_ema/config.json").exists() and (out / "adapter_ema/adapter_config.json").exists()
    else:
        files = load_file(out / "export_ema/model.safetensors")
        assert torch.equal(files["model.embed_tokens.weight"], stored["embed"])
        assert not torch.equal(
            load_file(out / "export/model.safetensors")["model.embed_tokens.weight"], stored["embed"]
        )


def params_at(out: Path, step: int) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in stored_at(out, step, "params.actor").items()}


def stored_at(out: Path, step: int, part: str) -> dict[str, torch.Tensor]:
    header = read_header(out / f"checkpoints/step-{step:08d}/{part}.safetensors")
    with Reader() as reader:
        return {name.removeprefix(f"{part}."): reader.read(header, name) for name in header.entries}


def test_an_evaluation_of_the_average_has_names_of_its_own(spec: Path, tmp_path: Path) -> None:
    """Near decay 0 the average is the model, and near decay 1 what the phase began with."""
    found = {}
    for decay in (1e-9, 1 - 1e-9):
        ema = {"decay": decay, "schedule": "constant", "export": False}
        out = done(spec, tmp_path / f"{decay}", phases__grpo__ema=ema, phases__sft__steps=2, **FAST, **JUDGED)
        found[decay] = [
            line for line in tiny.lines(out / "metrics.jsonl") if line["phase"] == "grpo" and "eval/score" in line
        ]
        assert not (out / "export_ema").exists()
    for decay, lines in found.items():
        before, *after = lines
        assert "eval_ema/score" not in before and len(after) == 2
        for line in after:
            same_as = line if decay < 0.5 else before
            for name in ("digest", "score"):
                assert line[f"eval_ema/{name}"] == same_as[f"eval/{name}"]
    assert any(line["eval_ema/score"] != line["eval/score"] for line in found[1 - 1e-9][1:]), (
        "and the two can be told apart"
    )


def test_averages_are_shown_beside_the_evaluation(spec: Path, tmp_path: Path) -> None:
    ema = {"evaluate": True, "export": True}
    said = tiny.run(spec, tmp_path / "out", phases__grpo__ema=ema, **JUDGED)
    assert re.search(r"eval .*digest=\d.*ema digest=\d", said.out)
    assert f"its average in {tmp_path / 'out/export_ema'}" in said.out


def test_a_dry_run_says_which_snapshots_are_kept(spec: Path, tmp_path: Path) -> None:
    said = tiny.run(spec, tmp_path / "out", "--dry-run", phases__grpo__ema={}, phases__grpo__offload=["reference"]).out
    assert said.count("keeps") == 2 and "    keeps reference, on the host\n    keeps ema\n" in said


# ------------------------------------------------------------------------------------- resume, offload

KEPT: Mapping[str, Any] = {
    "phases__grpo__ema": {"decay": 0.9, "every": 3, "start": 1},
    "phases__grpo__algorithm__reference_every": 2,
}


@pytest.mark.parametrize(("finetune", "cut"), [("full", 2), (WATCHED["finetune"], 3)], ids=["full", "merged"])
def test_a_stopped_grpo_run_goes_on_bit_for_bit(spec: Path, tmp_path: Path, finetune: Any, cut: int) -> None:
    """Cut right behind, and before, a renewal of the reference."""
    changed = {**KEPT, "finetune": finetune, "evaluation__every": 1}
    whole, parts = done(spec, tmp_path / "whole", **changed), tmp_path / "parts"
    done(spec, parts, **{**changed, "phases__grpo__steps": cut})
    done(spec, parts, "--resume", **changed)
    assert tiny.state(parts) == tiny.state(whole)
    assert tiny.files(parts / "export_ema") == tiny.files(whole / "export_ema")
    assert tiny.untimed(parts / "metrics.jsonl") == tiny.untimed(whole / "metrics.jsonl")
    scalars = read_manifest(tiny.last_checkpoint(whole)).values.scalars
    assert (scalars["controls.ema_steps"], scalars["controls.ema_updates"]) == (8, 2)


def test_a_stopped_dpo_run_with_muon_and_a_renewed_reference_goes_on_bit_for_bit(tmp_path: Path) -> None:
    changed = {
        **PAIRS,
        "phases__dpo__epochs": 2,
        "phases__dpo__batch__rows": 12,
        "phases__dpo__optimizers": [{"kind": "muon", "lr": 0.01}],
        "phases__dpo__ema": {"decay": 0.9},
        "phases__dpo__algorithm__reference_every": 3,
        "phases__dpo__offload": ["reference", "ema"],
    }
    whole = done(DPO, tmp_path / "whole", **changed)
    assert len(steps_of(whole, "dpo")) == 8
    done(DPO, tmp_path / "parts", **{**changed, "phases__dpo__epochs": 1})
    done(DPO, tmp_path / "parts", "--resume", **changed)
    assert tiny.state(tmp_path / "parts") == tiny.state(whole)
    apart = done(DPO, tmp_path / "beside", **{**changed, "phases__dpo__offload": []})
    assert tiny.state(apart) == tiny.state(whole)
    assert tiny.untimed(apart / "metrics.jsonl") == tiny.untimed(whole / "metrics.jsonl")


def test_a_stopped_ppo_run_with_muon_adamw_and_an_average_goes_on_bit_for_bit(tmp_path: Path) -> None:
    changed = {
        **SMALL,
        "phases__ppo__algorithm__reference_every": 2,
        "phases__ppo__ema": {"decay": 0.9},
        "phases__ppo__offload": ["reference"],
        "phases__ppo__batch__rows": 8,
        "phases__ppo__steps": 4,
        "phases__ppo__algorithm__critic__warmup": 1,
        "phases__ppo__optimizers": [
            {"role": "actor", "kind": "muon", "lr": 0.01},
            {"role": "critic", "kind": "adamw", "lr": 0.01},
        ],
    }
    whole = done(PPO, tmp_path / "whole", **changed)
    done(PPO, tmp_path / "parts", **{**changed, "phases__ppo__steps": 2})
    done(PPO, tmp_path / "parts", "--resume", **changed)
    assert tiny.state(tmp_path / "parts") == tiny.state(whole)
    scalars = read_manifest(tiny.last_checkpoint(whole)).values.scalars
    assert scalars["controls.ema_steps"] == 6, "two mini-batches in each of the three iterations that moved the actor"


def test_what_is_put_away_changes_no_bit_of_a_run_and_may_be_changed_when_it_goes_on(
    spec: Path, tmp_path: Path
) -> None:
    beside = done(spec, tmp_path / "beside", **KEPT)
    away = done(spec, tmp_path / "away", **KEPT, phases__grpo__offload=["ema", "reference"])
    assert tiny.difference(beside, away) is None
    assert tiny.files(beside / "export_ema") == tiny.files(away / "export_ema")
    mixed = done(spec, tmp_path / "mixed", **{**KEPT, "phases__grpo__steps": 2})
    done(spec, mixed, "--resume", **KEPT, phases__grpo__offload=["reference"])
    assert tiny.difference(beside, mixed) is None


# ------------------------------------------------------------------------------------- renewal


def test_a_renewed_reference_of_pairs_is_asked_again(tmp_path: Path) -> None:
    """Every step takes all pairs; where actor and reference are one, the loss is ln 2."""
    out = done(
        DPO,
        tmp_path / "out",
        **PAIRS,
        phases__dpo__epochs=5,
        phases__dpo__batch__rows=48,
        phases__dpo__algorithm__reference_every=2,
        phases__dpo__optimizers__0__schedule={"kind": "constant"},
    )
    losses = [line["train/loss"] for line in steps_of(out, "dpo")]
    assert len(losses) == 5
    for step, loss in enumerate(losses):
        if step % 2:
            assert loss < math.log(2) - 1e-4
        else:
            assert loss == pytest.approx(math.log(2), abs=1e-6)


def test_a_renewed_reference_of_rollouts_is_the_actor(spec: Path, tmp_path: Path) -> None:
    out = done(
        spec,
        tmp_path / "out",
        phases__grpo__steps=5,
        phases__grpo__algorithm__minibatches=1,
        phases__grpo__algorithm__reference_every=2,
    )
    divergences = [line["train/kl"] for line in steps_of(out, "grpo")]
    assert [value < 1e-9 for value in divergences] == [True, False, True, False, True]


# ------------------------------------------------------------------------------------- merged weights


def test_merged_rollouts_differ_from_training_by_roundings_and_say_so(spec: Path, tmp_path: Path) -> None:
    changed = {"phases__grpo__algorithm__minibatches": 1, "phases__grpo__optimizers__0__lr": 0.02}
    apart = steps_of(done(spec, tmp_path / "apart", **changed, finetune="lora"), "grpo")
    merged = steps_of(done(spec, tmp_path / "merged", **changed, **WATCHED), "grpo")
    for one, other in zip(apart, merged, strict=True):
        assert one["train/logp_diff_max"] < 1e-4 and other["train/logp_diff_max"] < 1e-4
    assert [line["train/logp_diff_mean"] for line in apart] != [line["train/logp_diff_mean"] for line in merged]


def test_R3_merged_weights_are_made_once_for_every_policy_and_let_go_before_training(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    of, clear = Derived.of, Derived.clear

    def noted_of(self: Derived[Any], source: Any) -> Any:
        told.append("asked")
        return of(self, source)

    def noted_clear(self: Derived[Any]) -> None:
        told.append("let go" if self.is_held else "nothing to let go")
        clear(self)

    monkeypatch.setattr(Derived, "of", noted_of)
    monkeypatch.setattr(Derived, "clear", noted_clear)
    done(spec, tmp_path / "out", **WATCHED, phases__sft__steps=1, phases__grpo__steps=2, evaluation__every=1)
    made = "nothing to let go"
    assert told == [
        *("asked", made, "let go"),  # the run's first evaluation, then a supervised step
        *("asked", made),  # an evaluation
        *("asked", "let go"),  # a rollout with the same policy makes nothing; then an update
        *("asked", made),
        *("asked", "let go"),
        *("asked", made, "let go"),  # the last evaluation, and the end
    ]


def test_the_guide_to_variants_runs(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/variants.md", "python")
    scope: Any = run_block(code, tmp_path, monkeypatch)
    assert scope["average"]["w"].tolist() == [(0.5 + 2) / 4 + 3 / 2] * 3  # (1 / 2 + 2) / 2, then with 3
    assert scope["params"]["w"].tolist() == [0.0] * 3
    assert scope["before"]["w"].tolist() == scope["back"]["w"].tolist() == [3.0] * 3
    average, away = blocks("docs/variants.md", "toml")
    before, after = spec.read_text().split("[evaluation]")
    spec.write_text(f"{before}{away}\n{average}\n[evaluation]{after}")
    last = af.plan(af.read_spec(str(spec))).phases[-1].spec
    assert last.offload == ["reference", "ema"] and last.ema is not None and last.ema.decay == 0.99
