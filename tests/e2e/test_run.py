"""A specification becomes a trained checkpoint: what a run leaves behind, and what may not change it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders
import torch
from e2e import judges, tiny
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from areno_fn import load_hf
from areno_fn.contracts.metrics import meaning
from areno_fn.engine import specfile

ARITHMETIC = {"kind": "arithmetic", "digits": 1}
GRPO_ONLY = "[[phases]]" + tiny.SPEC.split("[[phases]]")[2]
SFT_ONLY = "[[phases]]" + tiny.SPEC.split("[[phases]]")[1]


def without(text: str) -> str:
    """The tiny specification with one of its phases left out."""
    assert tiny.SPEC.count(text) == 1
    rest = text[text.index("[evaluation]") :] if "[evaluation]" in text else ""
    return tiny.SPEC.replace(text, rest)


SFT = without(GRPO_ONLY)
GRPO = without(SFT_ONLY)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_spec(tmp_path_factory.mktemp("spec"))


@pytest.fixture(scope="module")
def whole(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one complete run."""
    out = tmp_path_factory.mktemp("whole") / "deep" / "out"
    done = tiny.run(spec, out)
    assert (done.code, done.err) == (0, "")
    return out


def test_a_run_leaves_a_summary_of_its_phases(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    metrics = tiny.lines(whole / "metrics.jsonl")
    assert list(summary) == ["seed", "phases"]
    assert summary["seed"] == 0
    assert [list(phase) for phase in summary["phases"]] == [
        ["name", "algorithm", "steps", "seconds", "eval_seconds", "eval_rewards", "eval_start", "eval_end"]
    ] * 2
    for phase, name in zip(summary["phases"], ["sft", "grpo"], strict=True):
        own = [line for line in metrics if line["phase"] == name]
        scores = [line["eval/score"] for line in own if "eval/score" in line]
        assert (phase["name"], phase["algorithm"], phase["steps"]) == (name, name, 4)
        assert (phase["eval_start"], phase["eval_end"]) == (scores[0], scores[-1])
        assert phase["seconds"] == pytest.approx(sum(line.get("time/step", 0) for line in own), abs=1e-3)
        evaluating = [line["time/evaluation"] for line in own if "eval/score" in line]
        assert len(evaluating) == len(scores) == 3 and all(seconds > 0 for seconds in evaluating[1:])
        assert (evaluating[0] == 0) is (name == "grpo"), "a phase begins with what the one before it ended with"
        assert phase["eval_seconds"] == pytest.approx(sum(evaluating), abs=1e-3)
        assert phase["eval_rewards"] == ["exact_match"]


def test_metrics_stand_in_order_once_and_have_names_of_the_table(whole: Path) -> None:
    def phase(name: str, first: int) -> list[tuple[int, str, str]]:
        found = [(first, name, "evaluation")]
        for step in range(first + 1, first + 5):
            found.append((step, name, "step"))
            found += [(step, name, "evaluation")] if step % 2 == 0 else []
        return found

    assert tiny.kinds(whole / "metrics.jsonl") == [*phase("sft", 0), *phase("grpo", 4)]
    metrics = tiny.lines(whole / "metrics.jsonl")
    names = {name for line in metrics for name in line} - {"step", "phase", "time"}
    assert [name for name in names if meaning(name) is None] == []
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens", "train/entropy", "time/step"} <= names
    assert {"train/kl", "train/ratio_max", "train/clip_fraction", "rollout/reward_mean", "reward/short"} <= names
    assert {"rollout/tokens_per_s", "time/rollout", "time/reward", "time/train", "eval/exact_match"} <= names


def test_the_total_of_the_rewards_is_weighted_and_its_parts_are_not(whole: Path) -> None:
    judged = [line for line in tiny.lines(whole / "metrics.jsonl") if "reward/short" in line]
    assert len(judged) == 4
    for line in judged:
        assert line["rollout/reward_mean"] == pytest.approx(0.5 * line["reward/short"], rel=1e-6)


def test_samples_are_kept_of_evaluations_and_now_and_then_of_training(whole: Path) -> None:
    samples = tiny.lines(whole / "samples.jsonl")
    assert all(list(s) == ["step", "phase", "prompt", "completion", "reward", "answer"] for s in samples)
    places = [(s["step"], s["phase"]) for s in samples]
    # four of each evaluation; in the second phase four of the first and of every second step besides
    counts = {place: places.count(place) for place in places}
    evaluated = {(0, "sft"): 4, (2, "sft"): 4, (4, "sft"): 4, (4, "grpo"): 4}
    assert counts == {**evaluated, (5, "grpo"): 4, (6, "grpo"): 8, (8, "grpo"): 8}
    trained = [s for s in samples if s["phase"] == "grpo" and s["reward"] < 0]
    assert trained and all(s["reward"] == -0.5 * len(s["completion"]) for s in trained)


def test_the_picture_is_a_picture(whole: Path) -> None:
    with Image.open(whole / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10


def test_the_newest_checkpoints_stay(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    scalars = tiny.state(whole)[1]
    cursor = {name.removeprefix("cursor."): value for name, value in scalars.items() if name.startswith("cursor.")}
    counters = {name.removeprefix("counters."): v for name, v in scalars.items() if name.startswith("counters.")}
    assert cursor == {"phase": 2, "step": 4, "epoch": 0, "batch": 4, "total": 8}
    # 4 supervised updates, and 4 iterations of 2 mini-batches; 4 of the 5 batches of the first epoch
    assert counters == {"optimizer_step": 12, "rollout_iteration": 4, "data_epoch": 0}


def test_the_export_is_loaded_by_transformers_with_our_logits(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "export", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(whole / "export")
    text = "3+4=7"
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == [256, *text.encode()]
    assert (model.config.bos_token_id, model.config.eos_token_id) == (256, 257)
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) == text
    ours, params = load_hf(whole / "export")
    count = tokens.shape[1]
    hidden = ours.policy.hidden(params, tokens[0], torch.arange(count), torch.zeros(count, dtype=torch.int64))
    with torch.no_grad():
        theirs = model.eval()(tokens).logits[0]
    assert theirs.dtype is torch.float32
    assert (theirs - ours.policy.logits(params, hidden)).abs().max() <= 1e-5
    assert float(theirs.std()) > 0.01


def test_the_export_holds_the_parameters_of_the_last_checkpoint(whole: Path) -> None:
    _, exported = load_hf(whole / "export")
    saved = tiny.tensors(whole)
    assert torch.equal(exported.embed, saved["params.actor.embed"])
    assert not torch.equal(exported.embed, saved["snapshots.reference.embed"])


def test_the_resolved_specification_is_kept(whole: Path, spec: Path) -> None:
    kept = specfile.read(whole / "spec.yaml")
    assert kept == specfile.read(spec, [f"out={whole}"])


def test_one_seed_gives_one_result_and_another_seed_another(whole: Path, spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "again").code == 0
    assert tiny.difference(whole, tmp_path / "again") is None
    assert tiny.run(spec, tmp_path / "other", seed=1).code == 0
    mine, others = tiny.tensors(whole), tiny.tensors(tmp_path / "other")
    assert mine.keys() == others.keys()
    assert not torch.equal(mine["params.actor.embed"], others["params.actor.embed"])
    assert tiny.untimed(whole / "metrics.jsonl") != tiny.untimed(tmp_path / "other" / "metrics.jsonl")


@pytest.mark.parametrize("suffix", [".msgpack", ".yaml", ".json"])
def test_the_format_of_the_specification_does_not_matter(suffix: str, whole: Path, spec: Path, tmp_path: Path) -> None:
    packed = tmp_path / f"tiny{suffix}"
    specfile.write(specfile.read(spec), packed)
    assert tiny.run(packed, tmp_path / "out").code == 0
    assert tiny.difference(whole, tmp_path / "out") is None


def test_the_command_is_a_process_that_ends_with_0(whole: Path, tmp_path: Path) -> None:
    tiny.write_spec(tmp_path)
    done = tiny.in_subprocess(["tiny.toml", "--set", "log.tensorboard=true"], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "grpo 4/4" in done.out and "trained model in out/export" in done.out
    assert tiny.difference(whole, tmp_path / "out") is None
    assert list((tmp_path / "out" / "tensorboard").glob("events.out.tfevents.*"))


def test_set_changes_fields_by_name(spec: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"phases__grpo__steps": 1, "phases__sft__steps": 2, "log__samples": 1, "seed": 7}
    assert tiny.run(spec, tmp_path / "out", **values).code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["seed"] == 7
    assert [phase["steps"] for phase in summary["phases"]] == [2, 1]


@pytest.mark.parametrize("name", ["123", "true", "a=b", "[x]", "with space"])
def test_out_is_a_path_whatever_it_looks_like(
    name: str, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--set", "phases.sft.steps=1", "--set", "phases.grpo.steps=1"]
    done = tiny.in_process([str(spec), "--out", name, *short])
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / name / "summary.json").exists()


def test_a_dry_run_writes_nothing_and_reads_no_weight(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_load(monkeypatch)
    done = tiny.run(spec, tmp_path / "out", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "sft: sft (dataset + none), 4 steps of 8 rows from 40" in done.out
    assert "grpo: grpo (generation + runtime_reward), 4 steps of 4 rows from 20" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_that_questions_become_plain_texts(spec: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(8)))
    data = [{"kind": "jsonl", "path": str(rows)}]
    changes = {"phases__sft__data": data, "phases__grpo__data": data, "evaluation__data": data}
    done = tiny.run(spec, tmp_path / "out", "--dry-run", **changes)
    assert done.code == 0, done.err
    said = "    8 questions or instructions become plain texts that end their line, because the tokenizer has no chat template"
    assert done.out.splitlines().count(said) == 3


def test_a_dry_run_says_that_a_warm_up_takes_the_whole_phase(spec: Path, tmp_path: Path) -> None:
    """Four iterations of two mini-batches are eight optimizer steps."""
    change = {"phases__grpo__optimizers__0__lr": 0.004}
    done = {
        warmup: tiny.run(
            spec, tmp_path / "out", "--dry-run", phases__grpo__optimizers__0__schedule__warmup_steps=warmup, **change
        )
        for warmup in (7, 8, 16)
    }
    assert [found.code for found in done.values()] == [0, 0, 0]
    said = "    the learning rate of actor rises for {} optimizer steps, but it makes 8: it is {} at the end, and lr is 0.004"
    assert "rises for" not in done[7].out
    assert said.format(8, "0.004") in done[8].out
    assert said.format(16, "0.002") in done[16].out


def test_a_batch_of_more_rows_than_there_are_is_told(spec: Path, tmp_path: Path) -> None:
    said = "batch.rows is {}, but the data have {} rows, so that every batch is all of them"
    fits = tiny.run(spec, tmp_path / "out", "--dry-run", phases__sft__batch__rows=40, phases__grpo__batch__rows=20)
    assert fits.code == 0 and "but the data have" not in fits.out
    change = {"phases__sft__batch__rows": 41, "phases__grpo__batch__rows": 100}
    change |= {"phases__sft__steps": 1, "phases__grpo__steps": 1, "evaluation__limit": 1}
    dry, wet = (tiny.run(spec, tmp_path / "out", *flags, **change) for flags in (["--dry-run"], []))
    assert (dry.code, dry.err, wet.code, wet.err) == (0, "", 0, "")
    assert [line for line in dry.out.splitlines() if "but the data have" in line] == [
        f"    {said.format(41, 40)}",
        f"    {said.format(100, 20)}",
    ]
    assert wet.out.splitlines()[:2] == [
        f"phases.sft: {said.format(41, 40)}",
        f"phases.grpo: {said.format(100, 20)}",
    ]
    closing = [line for line in wet.out.splitlines() if " and evaluations in " in line]
    assert [line.split(":")[0] for line in closing] == ["sft", "grpo"]
    assert all(", exact_match 0.000 -> 0.000" in line for line in closing)


def test_S8_a_dry_run_refuses_what_a_run_refuses(whole: Path, spec: Path, tmp_path: Path) -> None:
    for flags, values in (
        (["--resume"], {"phases__grpo__batch__rows": 3}),
        (["--resume"], {"phases__grpo__steps": 3}),
        (["--resume", "--overwrite"], {}),
    ):
        dry, wet = tiny.run(spec, whole, "--dry-run", *flags, **values), tiny.run(spec, whole, *flags, **values)
        assert dry.code == wet.code == 2
        assert dry.err == wet.err != ""


def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when weights are read or drawn."""

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("areno_fn.engine.model.ModelPlan.load", load)
    monkeypatch.setattr("areno_fn.engine.session.initial_state", load)
    monkeypatch.setattr("areno_fn.engine.session.resumed_state", load)


def test_without_evaluation_and_checkpoints_a_run_still_ends_with_both_its_states(tmp_path: Path) -> None:
    text = tiny.SPEC[: tiny.SPEC.index("[evaluation]")]
    spec = tiny.write_spec(tmp_path, text)
    assert tiny.run(spec, tmp_path / "out", log__tensorboard=False).code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(p["eval_start"], p["eval_end"]) for p in summary["phases"]] == [(None, None)] * 2
    assert [kind for *_, kind in tiny.kinds(tmp_path / "out" / "metrics.jsonl")] == ["step"] * 8
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]


def test_a_phase_that_reaches_its_score_ends_there_and_the_next_begins(tmp_path: Path) -> None:
    spec = tiny.write_spec(tmp_path, tiny.SPEC.replace("areno_fn.world.rewards:exact_match", "e2e.judges:evaluation"))
    judges.prepare(evaluation=[0.125, 0.5, 0.75])
    goal = {"phases__sft__steps": 20, "phases__sft__stop_at": 0.75, "phases__grpo__steps": 1}
    done = tiny.run(spec, tmp_path / "out", **goal)
    assert (done.code, done.err) == (0, "")
    metrics = tiny.lines(tmp_path / "out" / "metrics.jsonl")
    scores = [(line["step"], line["phase"], line["eval/score"]) for line in metrics if "eval/score" in line]
    assert scores == [(0, "sft", 0.125), (2, "sft", 0.5), (4, "sft", 0.75), (4, "grpo", 0.75), (5, "grpo", 0.25)]
    assert judges.calls["evaluation"] == 4  # between two phases the parameters do not change
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [phase["steps"] for phase in summary["phases"]] == [4, 1]
    assert (summary["phases"][0]["eval_end"], summary["phases"][1]["eval_start"]) == (0.75, 0.75)


def test_a_last_phase_that_ended_at_its_score_stays_ended(tmp_path: Path) -> None:
    text = SFT.replace("areno_fn.world.rewards:exact_match", "e2e.judges:evaluation")
    spec = tiny.write_spec(tmp_path, text)
    judges.prepare(evaluation=[0.125, 0.75])
    goal = {"phases__sft__steps": 20, "phases__sft__stop_at": 0.75}
    assert tiny.run(spec, tmp_path / "out", **goal).code == 0
    before = tiny.files(tmp_path / "out")
    judges.prepare()
    assert tiny.run(spec, tmp_path / "out", "--resume", **goal).code == 0
    assert judges.calls["evaluation"] == 0
    assert tiny.files(tmp_path / "out") == before


def test_a_kl_term_keeps_the_policy_near_the_phase_s_start(tmp_path: Path) -> None:
    spec = tiny.write_spec(tmp_path, GRPO)

    def run(name: str, coefficient: float) -> list[dict[str, Any]]:
        values = {"phases__grpo__algorithm__kl_coef": coefficient, "phases__grpo__steps": 12, "evaluation__every": 0}
        assert tiny.run(spec, tmp_path / name, **values).code == 0
        return [line for line in tiny.lines(tmp_path / name / "metrics.jsonl") if "train/loss" in line]

    without, free, held = run("without", 0.0), run("free", 1e-9), run("held", 50.0)
    assert all("train/kl" not in line for line in without)
    assert not any(name.startswith("snapshots") for name in tiny.tensors(tmp_path / "without"))
    assert all(line["train/kl"] >= 0 for line in free + held)
    far, near = (sum(line["train/kl"] for line in lines[-4:]) for lines in (free, held))
    assert near < far / 2
    one, other = (tiny.tensors(tmp_path / name)["snapshots.reference.embed"] for name in ("free", "held"))
    assert torch.equal(one, other)


def test_minibatches_times_epochs_updates_are_made_of_one_rollout(tmp_path: Path) -> None:
    spec = tiny.write_spec(tmp_path, GRPO)
    values = {"phases__grpo__algorithm__minibatches": 3, "phases__grpo__algorithm__epochs": 2}
    assert tiny.run(spec, tmp_path / "out", phases__grpo__steps=2, **values).code == 0
    scalars = tiny.state(tmp_path / "out")[1]
    assert scalars["counters.optimizer_step"] == 2 * 3 * 2
    assert scalars["counters.rollout_iteration"] == 2
    steps = [line for line in tiny.lines(tmp_path / "out" / "metrics.jsonl") if "train/loss" in line]
    # from the second update on the policy is no longer the one that drew
    assert all(line["train/ratio_max"] > 1 + 1e-4 for line in steps)


def test_epochs_read_every_row_once_with_a_smaller_last_batch(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "response": "x" * (n + 1)} for n in range(5)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    text = SFT.replace("steps = 4", "epochs = 3").replace('{ kind = "arithmetic", digits = 1, count = 40 }', data)
    spec = tiny.write_spec(tmp_path, text)
    assert tiny.run(spec, tmp_path / "out", phases__sft__batch__rows=2).code == 0
    steps = [line for line in tiny.lines(tmp_path / "out" / "metrics.jsonl") if "train/tokens" in line]
    assert len(steps) == 3 * 3
    # each row has its characters and an end token as targets
    for epoch in range(3):
        assert sum(line["train/tokens"] for line in steps[3 * epoch : 3 * epoch + 3]) == sum(range(2, 7))
    scalars = tiny.state(tmp_path / "out")[1]
    assert scalars["counters.data_epoch"] == 3
    assert (scalars["cursor.epoch"], scalars["cursor.batch"]) == (3, 0)


def test_data_smaller_than_a_batch_is_a_batch(tmp_path: Path) -> None:
    spec = tiny.write_spec(tmp_path)
    few = {"phases__sft__data__0__count": 3, "phases__grpo__data__0__count": 2}
    assert tiny.run(spec, tmp_path / "out", **few).code == 0
    scalars = tiny.state(tmp_path / "out")[1]
    assert scalars["counters.data_epoch"] == 4


def test_several_sources_are_read_together_and_prompts_may_differ_in_length(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", [{"prompt": "ab", "response": "c"}, {"question": "?", "answer": "!"}])
    second = write_rows(tmp_path / "b.jsonl", [{"prompt": "a longer one", "response": "d", "answer": "d"}])
    both = f"{first}, {second}"
    text = tiny.SPEC.replace('{ kind = "arithmetic", digits = 1, count = 40 }', both)
    text = text.replace('{ kind = "arithmetic", digits = 1, count = 20 }', f"{both}, {both}")
    text = text.replace('{ kind = "arithmetic", digits = 1, count = 6, split = "heldout" }', second + ", " + first)
    text = text.replace("rewards:exact_match", "rewards:length_penalty").replace("max_length = 16", "max_length = 24")
    spec = tiny.write_spec(tmp_path, text)
    done = tiny.run(spec, tmp_path / "out", phases__grpo__batch__rows=6)
    assert (done.code, done.err) == (0, "")
    prompts = {sample["prompt"] for sample in tiny.lines(tmp_path / "out" / "samples.jsonl")}
    assert {"ab", "?", "a longer one"} <= prompts


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes a JSONL file; returns the data source that names it, as TOML."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f'{{ kind = "jsonl", path = "{path}" }}'


# ------------------------------------------------------------------------------------ Hugging Face folders


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """A tiny llama with a chat tokenizer, saved by transformers in a dtype."""
    home = tmp_path_factory.mktemp("llama")

    def make(dtype: torch.dtype) -> Path:
        folder = home / str(dtype).removeprefix("torch.")
        if folder.exists():
            return folder
        tokenizer_folders.byte_level(folder)
        size = len(AutoTokenizer.from_pretrained(folder))
        config = LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        (folder / "LICENSE").write_text("as you like")
        return folder

    return make


CHAT = [
    {"messages": [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "Paris."}]},
    {"question": "the capital of France?", "answer": "the capital is Paris"},
    {"instruction": "say", "input": "that", "output": "that"},
]


def folder_spec(tmp_path: Path, model: Path) -> Path:
    chat = write_rows(tmp_path / "chat.jsonl", CHAT)
    asked = write_rows(tmp_path / "asked.jsonl", [{"question": "the capital?", "answer": "P"}, {"prompt": "that is"}])
    text = f"""
device = "cpu"
model = {{ kind = "hf", path = "{model}" }}
checkpoint = {{ every = 1 }}
log = {{ tensorboard = false }}
[[phases]]
name = "sft"
epochs = 2
algorithm = {{ kind = "sft" }}
data = [{chat}]
batch = {{ rows = 2, max_length = 64, micro_tokens = 32 }}
optimizers = [{{ kind = "adamw", lr = 1e-4 }}]
[[phases]]
name = "grpo"
steps = 2
algorithm = {{ kind = "grpo", samples = 4, kl_coef = 0.1, sampling = {{ max_tokens = 5, top_p = 0.9 }} }}
data = [{asked}]
batch = {{ rows = 2, max_length = 64 }}
optimizers = [{{ kind = "adamw", lr = 1e-4 }}]
rewards = [{{ function = "areno_fn.world.rewards:length_penalty" }}]
"""
    return tiny.write_spec(tmp_path, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hugging_face_folder_becomes_a_trained_hugging_face_folder(
    dtype: torch.dtype, llama: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    source = llama(dtype)
    done = tiny.run(folder_spec(tmp_path, source), tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out/export/model.safetensors")
    assert before.keys() == after.keys()
    assert {name: t.dtype for name, t in after.items()} == dict.fromkeys(before, dtype)
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"} <= set(moved)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out/export" / name).read_bytes() == (source / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/export", dtype="auto")
    assert model.dtype is dtype


def test_a_bfloat16_source_is_trained_with_float32_masters(
    llama: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    assert tiny.run(folder_spec(tmp_path, llama(torch.bfloat16)), tmp_path / "out").code == 0
    saved = tiny.tensors(tmp_path / "out")
    params = {name: t for name, t in saved.items() if name.startswith("params.actor")}
    masters = {name.removeprefix("optim.actor.master."): t for name, t in saved.items() if ".master." in name}
    assert {t.dtype for t in params.values()} == {torch.bfloat16}
    assert {t.dtype for t in masters.values()} == {torch.float32}
    assert masters.keys() == {name.removeprefix("params.actor.") for name in params}
    for name, master in masters.items():
        assert torch.equal(params[f"params.actor.{name}"], master.bfloat16()), name
    # what bfloat16 cannot hold is kept
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    moments = [t for name, t in saved.items() if ".mu." in name or ".nu." in name]
    assert moments and {t.dtype for t in moments} == {torch.float32}


def test_the_dtype_in_memory_and_that_of_the_export_can_be_chosen(
    llama: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    source = llama(torch.bfloat16)
    spec = folder_spec(tmp_path, source)
    assert tiny.run(spec, tmp_path / "out", model__dtype="float32", export__dtype="float32").code == 0
    assert {t.dtype for n, t in tiny.tensors(tmp_path / "out").items() if n.startswith("params")} == {torch.float32}
    exported = load_file(tmp_path / "out/export/model.safetensors")
    assert {t.dtype for t in exported.values()} == {torch.float32}
    assert json.loads((tmp_path / "out/export/config.json").read_text())["dtype"] == "float32"


def test_an_export_goes_on_as_the_source_of_another_run(llama: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    assert tiny.run(folder_spec(tmp_path, llama(torch.float32)), tmp_path / "first").code == 0
    again = folder_spec(tmp_path, tmp_path / "first" / "export")
    assert tiny.run(again, tmp_path / "second").code == 0
    before, after = (load_file(tmp_path / name / "export/model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_another_tokenizer_than_the_folder_s_is_exported_in_its_place(
    llama: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    source, other = tmp_path / "source", tokenizer_folders.byte_level(tmp_path / "other", tokenizer_folders.NO_END)
    shutil.copytree(llama(torch.float32), source)
    (source / "added_tokens.json").write_text("{}")
    text = (
        folder_spec(tmp_path, source)
        .read_text()
        .replace("checkpoint =", f'tokenizer = {{ kind = "hf", path = "{other}" }}\ncheckpoint =')
    )
    text = text.replace(str(tmp_path / "chat.jsonl"), str(tmp_path / "plain.jsonl"))
    write_rows(tmp_path / "plain.jsonl", [{"prompt": "a", "response": "b"}])
    assert tiny.run(tiny.write_spec(tmp_path, text), tmp_path / "out").code == 0
    export = tmp_path / "out" / "export"
    assert (export / "tokenizer_config.json").read_bytes() == (other / "tokenizer_config.json").read_bytes()
    assert not (export / "added_tokens.json").exists()


def test_weights_that_no_optimizer_may_touch_stay(llama: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    """An update of rate 0 cannot be asked for; one too small for bfloat16 leaves every bit and still moves the master."""
    source = llama(torch.bfloat16)
    tiny_rate = {"phases__sft__optimizers__0__lr": 1e-12, "phases__grpo__optimizers__0__lr": 1e-12}
    assert tiny.run(folder_spec(tmp_path, source), tmp_path / "out", **tiny_rate).code == 0
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out/export/model.safetensors")
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


def test_a_source_in_several_files_is_exported_whole(llama: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    source = tmp_path / "sharded"
    shutil.copytree(llama(torch.float32), source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    half = len(weights) // 2
    index = {}
    for number, names in enumerate((list(weights)[:half], list(weights)[half:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, source / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert tiny.run(folder_spec(tmp_path, source), tmp_path / "one").code == 0
    assert tiny.run(folder_spec(tmp_path, llama(torch.float32)), tmp_path / "two").code == 0
    one, two = (load_file(tmp_path / name / "export/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
