"""Runs that train adapters: the model beside them stays as it is, and what is written can be read by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny
from e2e.test_readme import blocks, run_block
from msgspec import structs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import areno_fn as af
from areno_fn import tree
from areno_fn.ckpt.peft import read_adapter
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Lora
from areno_fn.engine import specfile
from areno_fn.engine.finetune import BASE
from areno_fn.engine.plan import Plan
from areno_fn.models.adapters import adapt, merge
from areno_fn.steps.recipes import ACTOR

SPEC = tiny.ROOT / "specs/lora.toml"
SHORT = {"phases__sft__steps": 6, "phases__grpo__steps": 2, "evaluation__limit": 4}
SHORTER = {"phases__grpo__rewards__0__function": "areno_fn.world.rewards:length_penalty", **SHORT}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the specification as it stands."""
    out = tmp_path_factory.mktemp("lora") / "out"
    done = tiny.run(SPEC, out)
    assert (done.code, done.err) == (0, "")
    return out


def started(*overrides: str) -> tuple[Plan, dict[str, Any]]:
    """A plan, and the parameters that its run starts from."""
    plan = af.plan(specfile.read(str(SPEC), overrides))
    return plan, plan.finetune.load(Key.of(plan.spec.seed), torch.device("cpu"))


def params(out: Path, plan: Plan) -> dict[str, Any]:
    """The parameters of each role in the last checkpoint."""
    tensors = stored(tiny.last_checkpoint(out))

    def one(name: str, like: Any) -> Any:
        own = role(tensors, f"params.{name}")
        return tree.unflatten(like, [own[path] for path, _ in tree.leaves_with_path(like)])

    return {name: one(name, like) for name, like in plan.finetune.shapes().items()}


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, read with the library of safetensors."""
    return {name: leaf for file in checkpoint.glob("*.safetensors") for name, leaf in load_file(file).items()}


def role(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """What stands below a name."""
    return {path.removeprefix(f"{name}."): leaf for path, leaf in tensors.items() if path.startswith(f"{name}.")}


def test_K19_adapters_change_with_every_step_and_the_base_never(tmp_path: Path) -> None:
    start = started()[1]
    base, seen = dict(tree.leaves_with_path(start[BASE])), dict(tree.leaves_with_path(start[ACTOR]))
    assert len(seen) == 2 * 7 * 2
    short = {**SHORT, "phases__sft__steps": 3, "phases__grpo__steps": 1}
    done = tiny.run(SPEC, tmp_path / "out", checkpoint__every=1, checkpoint__keep=9, **short)
    assert done.code == 0, done.err
    for step in (1, 2, 3):
        tensors = stored(tmp_path / "out/checkpoints" / f"step-{step:08d}")
        frozen, own = role(tensors, "params.base"), role(tensors, "params.actor")
        assert frozen.keys() == base.keys() and all(torch.equal(frozen[path], leaf) for path, leaf in base.items())
        assert own.keys() == seen.keys()
        same = {path for path, leaf in own.items() if torch.equal(leaf, seen[path])}
        # in the very first step B is still zero, so that A has no gradient
        assert same == ({path for path in own if path.endswith(".a")} if step == 1 else set())
        assert not any("embed" in name for name in role(tensors, "optim"))
        seen = own


def test_the_base_is_frozen_bit_for_bit_and_everything_is_trained_through_the_adapters(whole: Path) -> None:
    plan, start = started()
    end = params(whole, plan)
    assert tree.equal(end[BASE], start[BASE])
    assert not any(torch.equal(a, b) for a, b in zip(tree.leaves(end[ACTOR]), tree.leaves(start[ACTOR]), strict=True))
    optimized = [name for name in stored(tiny.last_checkpoint(whole)) if name.startswith("optim.") and ".mu." in name]
    assert len(optimized) == len(tree.leaves(end[ACTOR]))
    lines = [line for line in tiny.lines(whole / "metrics.jsonl") if line["phase"] == "sft" and "train/loss" in line]
    losses = [line["train/loss"] for line in lines]
    assert losses[-1] < losses[0] / 5
    # evaluations see the adapters too
    shown = [line["completion"] for line in tiny.lines(whole / "samples.jsonl") if line["phase"] == "sft"]
    assert len(shown) == 2 * 4 and not set(shown[:4]) & set(shown[4:])


def test_the_export_is_the_merged_model_and_transformers_computes_what_was_trained(whole: Path) -> None:
    plan, _ = started()
    end = params(whole, plan)
    view = plan.finetune.view(end)
    tokens = torch.tensor([256, *b"1+5=6"])
    places = torch.arange(len(tokens))
    ours = plan.model.policy.logits(view, plan.model.policy.hidden(view, tokens, places, torch.zeros_like(places)))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(whole / "export")(tokens[None]).logits[0]
    assert float((ours - theirs).abs().max()) < 1e-5
    model, exported = af.load_hf(whole / "export")
    assert model.family.name == "qwen3"
    assert tree.equal(exported, merge(adapt(end[BASE], end[ACTOR], plan.finetune.sites)))
    before = dict(tree.leaves_with_path(end[BASE]))
    changed = [path for path, leaf in tree.leaves_with_path(exported) if not torch.equal(leaf, before[path])]
    assert {path.split(".")[-1] for path in changed} == {"qkv", "o", "gate_up", "down"} and len(changed) == 8


def test_the_adapter_beside_the_export_is_the_actor_and_starts_another_run(whole: Path) -> None:
    plan, _ = started()
    end = params(whole, plan)
    file = read_adapter(whole / "adapter")
    assert (file.config.r, file.config.lora_alpha, file.config.lora_dropout) == (8, 16.0, 0.0)
    assert len(file.tensors) == len(tree.leaves(end[ACTOR]))
    again, loaded = started("finetune=lora", f"finetune.adapter={whole / 'adapter'}")
    assert tree.equal(loaded[ACTOR], end[ACTOR])
    assert again.identity.parameters != plan.identity.parameters


def test_S1_the_reference_is_the_adapter_that_the_policy_starts_from(whole: Path, tmp_path: Path) -> None:
    spec, out = specfile.read(str(SPEC)), tmp_path / "out"
    adapter = Lora(adapter=str(whole / "adapter"))
    specfile.write(structs.replace(spec, phases=spec.phases[1:], finetune=adapter), tmp_path / "grpo.yaml")
    done = tiny.run(tmp_path / "grpo.yaml", out, checkpoint__every=1, checkpoint__keep=9)
    assert done.code == 0, done.err
    plan, _ = started()
    start = dict(tree.leaves_with_path(params(whole, plan)[ACTOR]))
    assert all(leaf.any() for leaf in start.values())  # a reference without the adapter would be another model
    steps = [line for line in tiny.lines(out / "metrics.jsonl") if "train/kl" in line]
    # what the rollout recorded is what training computes: the same view, adapter included
    assert {line["train/ratio_mean"] for line in steps} == {1.0} and {line["train/ratio_std"] for line in steps} == {
        0.0
    }
    kl = [line["train/kl"] for line in steps]
    assert kl[0] == 0.0 and all(value > 1e-6 for value in kl[2:])
    folders = sorted((out / "checkpoints").iterdir())
    assert len(folders) == 5
    for folder in folders:
        tensors = stored(folder)
        reference, own = role(tensors, "snapshots.reference"), role(tensors, "params.actor")
        assert reference.keys() == start.keys()
        assert all(torch.equal(leaf, start[path]) for path, leaf in reference.items())
        assert not any(torch.equal(own[path], leaf) for path, leaf in start.items())


def test_a_run_that_was_stopped_within_a_phase_continues_bit_for_bit(tmp_path: Path) -> None:
    for name, first in (("whole", 4), ("halves", 2)):
        done = tiny.run(SPEC, tmp_path / name, **{**SHORTER, "phases__grpo__steps": first})
        assert done.code == 0, done.err
    done = tiny.run(SPEC, tmp_path / "halves", "--resume", **{**SHORTER, "phases__grpo__steps": 4})
    assert done.code == 0 and "continuing after step 8" in done.out, done.err
    assert tiny.state(tmp_path / "halves") == tiny.state(tmp_path / "whole")
    for folder in ("export", "adapter"):
        assert tiny.files(tmp_path / "halves" / folder) == tiny.files(tmp_path / "whole" / folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetune__rank": 4}, "finetune.rank was 8 and is now 4"),
        ({"finetune__targets": ["q_proj"]}, 'finetune.targets was [] and is now ["q_proj"]'),
        ({"finetune__alpha": 8.0}, "finetune.alpha was 16.0 and is now 8.0"),
        ({"finetune": "full"}, 'finetune.kind was "lora" and is now "full"'),
    ],
)
def test_another_way_of_training_is_another_run(whole: Path, changes: dict[str, Any], words: str) -> None:
    done = tiny.run(SPEC, whole, "--resume", **changes)
    assert done.code == 2 and words in done.err


def test_a_base_in_half_precision_is_merged_once_into_the_dtype_of_the_file(whole: Path, tmp_path: Path) -> None:
    model = {"kind": "hf", "path": str(whole / "export"), "dtype": "bfloat16"}
    done = tiny.run(SPEC, tmp_path / "out", model=json.dumps(model), tokenizer='{"kind": "byte"}', **SHORTER)
    assert done.code == 0, done.err
    plan, _ = started(f"model={json.dumps(model)}")
    end = params(tmp_path / "out", plan)
    assert {leaf.dtype for leaf in tree.leaves(end[BASE])} == {torch.bfloat16}
    assert {leaf.dtype for leaf in tree.leaves(end[ACTOR])} == {torch.float32}
    exported = af.load_hf(tmp_path / "out/export")[1]  # float32, as the folder that was read
    exact = merge(adapt(end[BASE], end[ACTOR], plan.finetune.sites, torch.float32), torch.float32)
    for (path, a), b in zip(tree.leaves_with_path(exported), tree.leaves(exact), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float()), path
    stored = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_a_dry_run_says_what_is_trained(tmp_path: Path) -> None:
    said = tiny.run(SPEC, tmp_path / "out", "--dry-run").out
    # rank 8 over the inputs and outputs of 7 maps in 2 layers
    count = 2 * 8 * sum(64 + rows for rows in (64, 32, 32, 128, 128)) + 2 * 8 * (64 + 64 + 128 + 64)
    assert f"trained: adapters of 14 linear maps, {count:,} parameters beside " in said
    assert "trained: all " in tiny.run(SPEC, tmp_path / "out", "--dry-run", finetune="full").out


def test_the_guide_to_adapters_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/adapters.md", "python")
    scope = run_block(code, tmp_path, monkeypatch)
    assert tree.equal(scope["base"], scope["params"]["base"])  # B is zero, so both directions add nothing
    (command,) = blocks("docs/adapters.md", "bash")
    assert command.split() == ["python", "-m", "areno_fn.run", "specs/lora.toml"]
    (table,) = blocks("docs/adapters.md", "toml")
    spec = tmp_path / "guide.toml"
    before, after = SPEC.read_text().split("[finetune]")
    spec.write_text(before + table + "\n" + after.partition("\n\n")[2])
    plan = af.plan(af.read_spec(str(spec)))
    assert [site.name for site in plan.finetune.sites] == ["q_proj", "v_proj"] * 2
