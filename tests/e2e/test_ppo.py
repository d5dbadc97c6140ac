"""PPO as a run: it learns, its critic is a role of its own, and it goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from e2e import tiny
from e2e.test_kill import Killed, die_after

import areno_fn as af
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.contracts.errors import JoinError, SpecError
from areno_fn.contracts.roles import Role

SPEC = tiny.ROOT / "specs/ppo.toml"
SHORT: dict[str, Any] = {
    "model__config__hidden_size": 32,
    "model__config__intermediate_size": 48,
    "model__config__num_hidden_layers": 2,
    "model__config__num_attention_heads": 2,
    "model__config__num_key_value_heads": 2,
    "phases__sft__steps": 2,
    "phases__ppo__steps": 4,
    "phases__ppo__batch__rows": 4,
    "phases__ppo__rewards__0__function": "areno_fn.world.rewards:length_penalty",
    "log__tensorboard": False,
}


def test_the_reward_of_the_samples_rises_and_the_kl_is_held(tmp_path: Path) -> None:
    done = tiny.run(SPEC, tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    steps = [line for line in tiny.lines(tmp_path / "out/metrics.jsonl") if line["phase"] == "ppo"]
    rewards = [line["rollout/reward_mean"] for line in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0
    assert ["train/loss" in line for line in steps[:3]] == [False, False, True], (
        "the critic warms up for two iterations"
    )
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    assert steps[-1]["critic/explained_variance"] > 0.2
    coefs = [line["rollout/kl_coef"] for line in steps]
    assert coefs[:3] == [0.02] * 3, "while the critic warms up the coefficient stands"
    assert coefs[-1] < 0.02, "the distance is below its target, so that the penalty falls"


def test_K16_a_killed_run_with_a_critic_muon_and_adamw_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    muon = {"kind": "muon", "role": "actor", "lr": 0.01, "schedule": {"kind": "cosine", "warmup_steps": 1}}
    adamw = {"kind": "adamw", "role": "critic", "lr": 0.001, "max_grad_norm": 0.5}
    values = SHORT | {
        "phases__ppo__optimizers": [muon, adamw],
        "checkpoint__every": 1,
        "checkpoint__keep": 1,
    }
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert tiny.run(SPEC, whole, **values).code == 0
    for saves in (3, 2):  # in the warm-up of the critic, and behind it
        die_after(monkeypatch, "save", saves)
        with pytest.raises(Killed):
            tiny.run(SPEC, out, "--resume", **values)
        monkeypatch.undo()
    assert tiny.run(SPEC, out, "--resume", **values).code == 0
    assert tiny.difference(whole, out) is None
    manifest = read_manifest(tiny.last_checkpoint(out))
    assert manifest.roles == (Role(name="actor"), Role(name="critic", exported=False))
    assert manifest.values.scalars["controls.ppo_iterations"] == 4
    kept = {file.name for file in manifest.files}
    assert {"params.critic.safetensors", "optim.critic.safetensors", "optim.actor.safetensors"} <= kept
    assert not (out / "critic").exists(), "a role that serves the training alone is left out of exports"


@pytest.mark.parametrize("finetune", ["full", "lora"])
def test_a_critic_that_is_asked_for_is_written_and_can_be_started_from(tmp_path: Path, finetune: str) -> None:
    out = tmp_path / "out"
    done = tiny.run(SPEC, out, **SHORT, finetune=finetune, export__roles=["critic"])
    assert (done.code, done.err) == (0, "")
    assert f"the critic in {out / 'critic'}" in done.out
    peer = transformers.AutoModelForSequenceClassification.from_pretrained(out / "critic")
    assert peer.config.num_labels == 1
    trained = tiny.tensors(out)
    head = "params.critic.head"
    assert torch.equal(peer.score.weight.data, trained[head]) and trained[head].any()

    again = tmp_path / "again"
    path = {"phases__ppo__algorithm__critic__path": str(out / "critic")}
    done = tiny.run(SPEC, again, **SHORT, **path, checkpoint__every=1)
    assert (done.code, done.err) == (0, "")
    first = next(line for line in tiny.lines(again / "metrics.jsonl") if line["phase"] == "ppo")
    assert first["critic/explained_variance"] != 0.0, "a critic with a head of zeros explains nothing"


def test_adapters_of_actor_and_critic_stand_on_one_frozen_base(tmp_path: Path) -> None:
    done = tiny.run(SPEC, tmp_path / "out", **SHORT, finetune="lora", checkpoint__every=1)
    assert (done.code, done.err) == (0, "")
    manifest = read_manifest(tiny.last_checkpoint(tmp_path / "out"))
    assert manifest.roles is not None
    assert {role.name: role.trunk for role in manifest.roles} == {"actor": "base", "critic": "base", "base": ""}
    saved = tiny.tensors(tmp_path / "out")
    assert not any(name.startswith("optim.base") for name in saved)
    assert any(name.startswith("optim.critic") for name in saved)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"phases__ppo__optimizers": [{"kind": "adamw"}]},
            "phases.ppo.optimizers: there must be exactly one for each trained role (actor, critic), received actor",
        ),
        (
            {"phases__sft__optimizers": [{"kind": "adamw"}, {"kind": "adamw", "role": "critic"}]},
            "phases.sft.optimizers: there must be exactly one for each trained role (actor), received actor, critic",
        ),
        (
            {"phases__ppo__algorithm__kl_coef": 0.0},
            "phases.ppo.algorithm.kl_target: it moves the coefficient of the KL in the reward; give kl_coef, and "
            "kl_in = 'reward'",
        ),
        (
            {"phases__ppo__algorithm__critic__warmup": 30},
            "phases.ppo.algorithm.critic.warmup: the critic would be trained alone for all 30 steps of the phase; use "
            "fewer than that",
        ),
        (
            {"export__roles": ["reference"]},
            "export.roles.0: beside the actor, which is always written, this run trains critic; remove 'reference'",
        ),
        (
            {"finetune": "lora", "phases__ppo__algorithm__critic__path": "x"},
            "phases.ppo.algorithm.critic.path: with finetune = 'lora' the critic stands on the same frozen model as the "
            "actor; remove the path, or train in full",
        ),
        (
            {"phases__ppo__optimizers__1__groups": [{"name": "g", "paths": ["value"], "lr": 1, "weight_decay": 0}]},
            "phases.ppo.optimizers: critic: the group 'g' asks for 'value', which names no parameter; they are "
            "trunk.embed, trunk.layers.0.attn_norm, trunk.layers.0.qkv and so on",
        ),
    ],
)
def test_a_wrong_critic_is_refused_before_anything_is_drawn(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    done = tiny.run(SPEC, tmp_path / "out", **values)
    assert done.code == 2 and sentence in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_critic_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert tiny.run(SPEC, out, **SHORT).code == 0
    done = tiny.run(SPEC, tmp_path / "next", **SHORT, phases__ppo__algorithm__critic__path=str(out / "export"))
    assert done.code == 2
    assert "phases.ppo.algorithm.critic.path: " in done.err and "['Qwen3ForCausalLM']" in done.err


def test_a_critic_that_diverges_ends_the_run_before_it_is_kept(tmp_path: Path) -> None:
    wild = {"kind": "sgd", "role": "critic", "lr": 1e3, "max_grad_norm": 0.0}
    critic = {"warmup": 2, "coef": 1e6}
    changes = {"phases__ppo__optimizers__1": wild, "phases__ppo__algorithm__critic": critic}
    done = tiny.run(SPEC, tmp_path / "out", **SHORT, **changes, checkpoint__every=1)
    assert done.code != 0 and "critic/" in done.err and "the learning rate of the critic" in done.err
    saved = tiny.tensors(tmp_path / "out")
    assert all(leaf.isfinite().all() for leaf in saved.values() if leaf.is_floating_point())


def test_a_critic_of_other_tokens_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert tiny.run(SPEC, out, **SHORT, export__roles=["critic"]).code == 0
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")),
        eos_token="c",
    )
    words.save_pretrained(out / "critic")
    done = tiny.run(SPEC, tmp_path / "next", **SHORT, phases__ppo__algorithm__critic__path=str(out / "critic"))
    assert done.code == 2 and "has another tokenizer than the run" in done.err


def test_losses_and_optimizers_of_ones_own_are_given_by_role_and_said_to_be_needed_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {name.replace("__", "."): value for name, value in {**SHORT, "out": str(tmp_path / "out")}.items()}
    spec = af.read_spec(str(SPEC), tiny.changes(values)[1::2])
    asked: list[str] = []

    def absolute(estimates: af.Estimates) -> af.Sums:
        asked.append("critic")
        errors = (estimates.value - estimates.returns).abs()
        total, weight = af.aggregate(errors, estimates.weight, estimates.segments, estimates.documents, "token_mean")
        return af.Sums(total=total, weight=weight, stats={}, peaks={})

    def update(gradient: Any, state: Any, params: Any) -> Any:
        asked.append("optimizer")
        return af.tree.map(lambda g: -1e-3 * g, gradient), state

    given = {"losses": {"ppo": {"critic": absolute}}, "optimizers": {"ppo": {"critic": (lambda params: (), update)}}}
    assert af.train(spec, **given) == 0
    assert {"critic", "optimizer"} <= set(asked)
    plan = af.plan(spec, **given)
    assert plan.own == ("losses", "optimizers")
    with pytest.raises(
        SpecError, match="a loss was given for 'judge', but the roles that are trained are actor, critic"
    ):
        af.plan(spec, losses={"ppo": {"judge": absolute}})
    with pytest.raises(JoinError, match="absolute takes Estimates"):
        af.plan(spec, losses={"ppo": {"actor": absolute}})
    assert capsys.readouterr().err == ""


def test_a_dry_run_says_what_moves_each_role(tmp_path: Path) -> None:
    done = tiny.run(SPEC, tmp_path / "out", "--dry-run")
    assert ", and a critic of " in done.out
    assert "actor is moved by adamw (" in done.out and "critic is moved by adamw (" in done.out
