"""Runs whose completions are judged by a reward model."""

from __future__ import annotations

import io
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import reward_folders
import tokenizer_folders
import torch
import transformers
from e2e import tiny
from safetensors.torch import load_file, save_file

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.record import donate
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.loop import train
from areno_fn.engine.recorder import Recorder
from areno_fn.engine.reward_models import ModelJudge
from areno_fn.engine.rewards import models_of
from areno_fn.engine.start import initial_state
from areno_fn.world.display import PlainDisplay
from areno_fn.world.samples import SampleLog
from areno_fn.world.tokenizer_bytes import ByteTokenizer
from areno_fn.world.trackers import JsonlTracker

SHORT: dict[str, Any] = {"phases__sft__steps": 1, "phases__grpo__steps": 4, "phases__grpo__algorithm__minibatches": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "judge"
    reward_folders.write(path)
    return path


@pytest.fixture
def home(tmp_path: Path, folder: Path) -> Path:
    shutil.copytree(folder, tmp_path / "judge")
    return tmp_path


def start(home: Path, *flags: str, model: str = "judge", **values: Any) -> tiny.Done:
    reward = {"kind": "model", "path": str(home / model), "name": "liked"}
    judges = {"phases__grpo__rewards": [reward], "evaluation__rewards": [reward]}
    return tiny.run(tiny.write_spec(home), home / "out", *flags, **(judges | SHORT | values))


def other_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"] *= -1
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A complete run, and the folder that its completions were judged with."""
    home = tmp_path_factory.mktemp("whole")
    shutil.copytree(folder, home / "judge")
    done = start(home)
    assert (done.code, done.err) == (0, "")
    return home


def test_what_is_recorded_of_completions_is_what_transformers_says_of_them(whole: Path) -> None:
    """Of those whose text is all there is: an end token was drawn or the limit of 4 was reached, and the bytes are text."""
    peer, tokenizer = reward_folders.peer(), ByteTokenizer()
    compared = 0
    for sample in tiny.lines(whole / "out" / "samples.jsonl"):
        said = tokenizer.encode(sample["completion"])
        if sample["phase"] != "grpo" or "\ufffd" in sample["completion"] or len(said) > 4:
            continue
        tokens = [256, *tokenizer.encode(sample["prompt"]), *said]
        endings = [tokens] if len(said) == 4 else [[*tokens, 257]]
        (wanted,) = reward_folders.scores(peer, endings, 258)
        compared += abs(wanted - sample["reward"]) < 1e-4
    assert compared >= 3, "an untrained model draws few texts"
    steps = [line for line in tiny.lines(whole / "out" / "metrics.jsonl") if "reward/liked" in line]
    assert len(steps) == 4
    assert all("eval/liked" in line for line in tiny.lines(whole / "out" / "metrics.jsonl") if "eval/score" in line)


def test_a_reward_model_is_in_no_state_and_no_export(whole: Path) -> None:
    names = tiny.tensors(whole / "out")
    assert names and not any("score" in name or "judge" in name or "reward" in name for name in names)
    shapes = {tuple(tensor.shape) for tensor in names.values()}
    own = {tuple(tensor.shape) for tensor in load_file(whole / "judge" / "model.safetensors").values()}
    assert (1, 16) in own - shapes, "the head is not there"
    exported = load_file(whole / "out" / "export" / "model.safetensors")
    assert "score.weight" not in exported
    assert json.loads((whole / "out" / "export" / "config.json").read_text())["hidden_size"] == 32


def test_a_run_goes_on_bit_for_bit_with_a_folder_that_has_moved(home: Path, whole: Path) -> None:
    assert start(home, phases__grpo__steps=2).code == 0
    (home / "judge").rename(home / "moved")
    done = start(home, "--resume", model="moved")
    assert (done.code, done.err) == (0, "")
    assert tiny.difference(home / "out", whole / "out") is None


def test_another_reward_model_is_another_run(home: Path) -> None:
    assert start(home, phases__grpo__steps=1).code == 0
    other_weights(home / "judge")
    done = start(home, "--resume")
    assert done.code == 2
    assert "belongs to another run: a loss of one's own, the end tokens, what a reward model's folder holds" in done.err
    shutil.copytree(home / "judge", home / "other")
    elsewhere = start(home, "--resume", model="other")
    assert elsewhere.code == 2
    assert "phases.grpo.rewards.0.path was " in elsewhere.err
    assert start(home, "--resume", "--accept", "phases", model="other").code == 0


def test_the_model_of_an_evaluation_is_no_part_of_the_run(home: Path) -> None:
    exact = [{"kind": "function", "function": "areno_fn.world.rewards:exact_match"}]
    assert start(home, phases__grpo__rewards=exact, phases__grpo__steps=1).code == 0
    other_weights(home / "judge")
    assert start(home, "--resume", phases__grpo__rewards=exact).code == 0


def test_what_an_evaluation_is_judged_by_changes_nothing_of_the_training_and_the_other_way_round(
    home: Path, whole: Path
) -> None:
    def of(path: Path, prefix: str) -> list[dict[str, Any]]:
        lines = tiny.untimed(path / "out" / "metrics.jsonl")
        return [line for line in lines if any(name.startswith(prefix) for name in line)]

    exact = [{"kind": "function", "function": "areno_fn.world.rewards:exact_match"}]
    done = start(home, evaluation__rewards=exact)
    assert (done.code, done.err) == (0, "")
    assert tiny.state(home / "out") == tiny.state(whole / "out")
    assert of(home, "train/") == of(whole, "train/")
    assert of(home, "eval/") != of(whole, "eval/")
    before = of(home, "eval/")[0]
    assert start(home, "--overwrite", evaluation__rewards=exact, phases__grpo__rewards=exact).code == 0
    assert of(home, "eval/")[0] == before, "the same model was evaluated by the same rewards"
    assert tiny.state(home / "out") != tiny.state(whole / "out")


def test_phases_and_evaluation_share_one_model_which_a_plan_does_not_read(home: Path) -> None:
    reward = {"kind": "model", "path": str(home / "judge")}
    changes = [f"phases.grpo.rewards={json.dumps([reward])}", f"evaluation.rewards={json.dumps([reward])}"]
    plan = af.plan(af.read_spec(str(tiny.write_spec(home)), changes))
    training, held_out = [reward.function for reward in plan.rewards]
    assert isinstance(training, ModelJudge) and isinstance(held_out, ModelJudge)
    assert training.model is held_out.model
    assert not training.model.in_memory
    assert training.model.device == torch.device("cpu")


def test_a_dry_run_says_what_will_judge(home: Path) -> None:
    done = start(home, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("liked: the llama in ") == 2
    assert "frozen parameters, which reads the tokens as drawn" in done.out


def test_ppo_and_gspo_learn_from_a_reward_model(home: Path) -> None:
    for kind in ("gspo", "ppo"):
        algorithm = {"kind": kind, "samples": 4, "sampling": {"max_tokens": 4}}
        optimizers = [{"kind": "adamw", "lr": 0.003}]
        optimizers += [{"kind": "adamw", "lr": 0.003, "role": "critic"}] if kind == "ppo" else []
        values = {
            "phases__grpo__algorithm": algorithm,
            "phases__grpo__optimizers": optimizers,
            "phases__grpo__steps": 1,
        }
        values = {**values, "phases__grpo__algorithm__minibatches": 1}
        done = start(home, "--overwrite", **values)
        assert (done.code, done.err) == (0, ""), kind
        assert any("reward/liked" in line for line in tiny.lines(home / "out" / "metrics.jsonl"))


def test_what_a_critic_has_learnt_can_judge_another_run(home: Path) -> None:
    """The folder that a run leaves of its critic is one of a reward model, tokenizer included."""
    algorithm = {"kind": "ppo", "samples": 4, "sampling": {"max_tokens": 4}}
    moved = [{"kind": "adamw", "lr": 0.003}, {"kind": "adamw", "lr": 0.003, "role": "critic"}]
    short = SHORT | {"phases__grpo__algorithm": algorithm, "phases__grpo__optimizers": moved, "phases__grpo__steps": 2}
    first = tiny.run(tiny.write_spec(home), home / "first", **short, export__roles=["critic"], evaluation=None)
    assert (first.code, first.err) == (0, "")
    done = start(home, model="first/critic", phases__grpo__steps=1)
    assert (done.code, done.err) == (0, "")
    steps = [line for line in tiny.lines(home / "out" / "metrics.jsonl") if "reward/liked" in line]
    assert steps[0]["reward/liked"] != 0.0, "a critic that has learnt nothing says 0"


def test_S3_a_critic_from_the_same_folder_trains_and_the_reward_model_stays_as_it_is(home: Path) -> None:
    algorithm = {"kind": "ppo", "samples": 4, "sampling": {"max_tokens": 4}, "critic": {"path": str(home / "judge")}}
    table = tomllib.loads(tiny.SPEC)
    table["phases"][1] |= {
        "algorithm": algorithm,
        "optimizers": [{"kind": "adamw", "lr": 0.003}, {"kind": "adamw", "lr": 0.003, "role": "critic"}],
        "rewards": [{"kind": "model", "path": str(home / "judge")}],
    }
    del table["phases"][0], table["evaluation"]
    plan = af.plan(msgspec.convert(table | {"out": str(home / "out")}, RunSpec))
    (model,) = models_of(plan.rewards)
    frozen = model.load()
    before = {path: leaf.clone() for path, leaf in tree.leaves_with_path(frozen)}
    state = initial_state(plan)
    begun = {path: leaf.clone() for path, leaf in tree.leaves_with_path(state.params["critic"])}
    assert all(torch.equal(begun[path], leaf) for path, leaf in before.items()), "both begin as the folder says"
    memory = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(frozen)}

    recorder = Recorder(
        plan=plan,
        display=PlainDisplay(io.StringIO()),
        tracker=JsonlTracker(home / "metrics.jsonl"),
        sample_log=SampleLog(home / "samples.jsonl"),
        store=lambda state: None,
    )
    last = train(plan, donate(state), recorder)
    recorder.close()
    kept = [leaf for part in (last.params, last.optim, last.snapshots) for leaf in tree.leaves(part)]
    assert memory.isdisjoint(leaf.untyped_storage().data_ptr() for leaf in kept if isinstance(leaf, torch.Tensor))
    assert not any(torch.equal(leaf, begun[path]) for path, leaf in tree.leaves_with_path(last.params["critic"]))
    assert model.load() is frozen
    assert all(torch.equal(before[path], leaf) for path, leaf in tree.leaves_with_path(frozen))


# ------------------------------------------------------------------------------------------ conversations


def policy_folder(folder: Path) -> None:
    """A small llama with a tokenizer of 300 tokens and a chat template."""
    sizes = {name: value for name, value in reward_folders.SIZES.items() if name not in ("num_labels", "pad_token_id")}
    config = transformers.LlamaConfig(**(sizes | {"vocab_size": 300}), eos_token_id=2, bos_token_id=None)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer_folders.byte_level(folder)


def test_conversations_are_judged_in_the_words_of_the_reward_model(home: Path) -> None:
    """Every recorded reward is what transformers says of the text as the reward model's template writes it."""
    policy_folder(home / "policy")
    model = reward_folders.write(home / "judge", "qwen3", vocab_size=300, pad_token_id=0, max_position_embeddings=256)
    words = tokenizer_folders.byte_level(home / "judge", tokenizer_folders.NO_END)
    asked = [
        [{"role": "user", "content": "12 34"}],
        [{"role": "system", "content": "You are"}, {"role": "user", "content": "the capital"}],
        [*({"role": role, "content": "then"} for role in ("user", "assistant")), {"role": "user", "content": "lines"}],
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps({"prompt": messages}) + "\n" for messages in asked))
    text = tiny.SPEC[: tiny.SPEC.index("[model]")] + f'[model]\nkind = "hf"\npath = "{home}/policy"\n\n'
    spec = tiny.write_spec(home, text + tiny.SPEC[tiny.SPEC.index("[[phases]]") :])
    reward = {"kind": "model", "path": str(home / "judge"), "weight": 0.5}
    values = {"phases.grpo.data": [{"kind": "jsonl", "path": str(home / "rows.jsonl")}], "evaluation": None}
    values |= {
        "phases.grpo.rewards": [reward],
        "phases.grpo.batch": {"rows": 3, "max_length": 64},
        "phases.grpo.steps": 1,
    }
    values |= {"phases.sft.steps": 1, "phases.sft.batch.max_length": 64, "log.samples": 12}
    done = tiny.in_process([str(spec), "--out", str(home / "out"), *tiny.changes(values)])
    assert (done.code, done.err) == (0, "")

    tokenizer = transformers.AutoTokenizer.from_pretrained(words)
    by_last = {messages[-1]["content"]: messages for messages in asked}
    samples = [sample for sample in tiny.lines(home / "out" / "samples.jsonl") if sample["phase"] == "grpo"]
    assert {sample["prompt"] for sample in samples} == by_last.keys() and len(samples) == 12
    for sample in samples:
        messages = by_last[sample["prompt"]]
        opening = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        spoken = [*messages, {"role": "assistant", "content": sample["completion"]}]
        texts = [opening + sample["completion"], tokenizer.apply_chat_template(spoken, tokenize=False)]
        said = [
            reward_folders.scores(model, [tokenizer.encode(text, add_special_tokens=False)], 0)[0] for text in texts
        ]
        assert min(abs(0.5 * value - sample["reward"]) for value in said) < 1e-5, sample
