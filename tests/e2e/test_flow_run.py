"""Flow models through the plan, the loop, the recorder, checkpoints and export that models of text go through."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from diffusers import DiTTransformer2DModel
from e2e import kill, tiny
from e2e.tiny_flow import SPEC
from PIL import Image

import areno_fn as af
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.spec import AlgorithmSpec, Denoising, FlowAlgorithm
from areno_fn.contracts.state import TrainState
from areno_fn.engine.start import initial_state
from areno_fn.models.digits_dit.model import DiTPolicy
from areno_fn.steps.flow.noise import latent_noise

STEPS = [(0, "sft"), (2, "sft"), (4, "sft"), (4, "grpo"), (6, "grpo"), (8, "grpo")]
"""When and in which phase is evaluated."""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return tiny.write_spec(tmp_path, SPEC)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that was left alone."""
    home = tmp_path_factory.mktemp("whole")
    done = tiny.run(tiny.write_spec(home, SPEC), home / "out")
    assert (done.code, done.err) == (0, "")
    return home / "out"


def test_a_run_leaves_metrics_pictures_a_summary_and_curves(whole: Path) -> None:
    found = tiny.lines(whole / "metrics.jsonl")
    evaluations = [line for line in found if "eval/score" in line]
    assert [(line["step"], line["phase"]) for line in evaluations] == STEPS
    assert all(line["eval/contrast"] == line["eval/score"] and line["eval/diversity"] > 0 for line in evaluations)
    summary = json.loads((whole / "summary.json").read_text())
    assert [(phase["algorithm"], phase["steps"]) for phase in summary["phases"]] == [("flow_sft", 4), ("flow_grpo", 4)]
    assert summary["phases"][1]["eval_end"] == evaluations[-1]["eval/score"]
    sheets = sorted(path.name for path in (whole / "pictures").iterdir())
    assert sheets == [f"step-0000000{step}.png" for step in (0, 2, 4, 6, 8)]
    assert (whole / "curves.png").stat().st_size > 10_000
    steps = [line for line in found if "time/step" in line and line["phase"] == "grpo"]
    assert steps[0]["train/ratio_max"] >= 1 and steps[0]["flow/kl"] >= 0 and "rollout/zero_std_groups" in steps[0]
    assert steps[-1]["flow/kl"] > 0
    assert all(line["flow/steps"] == 4 * 4 * 2 for line in steps), "rows x samples x noisy steps"
    names = {name for line in found for name in line}
    assert not [name for name in names if "token" in name or "response" in name or "completion" in name]
    assert all(phase["eval_rewards"] == ["contrast"] for phase in summary["phases"])


def test_a_sheet_shows_the_pictures_of_the_evaluation(whole: Path) -> None:
    """The reward of the first picture, the contrast, is measured again in the sheet, whose pixels are bytes."""
    sheet = np.asarray(Image.open(whole / "pictures" / "step-00000008.png"), np.float64) / 255
    evaluation = af.plan(af.read_spec(str(whole / "spec.yaml"))).evaluation
    assert evaluation is not None
    label = evaluation.rows[0]["label"]
    top = 2 + 34 * sorted({row["label"] for row in evaluation.rows}).index(label)
    shown = sheet[top : top + 32 : 4, 2:34:4]
    first = tiny.lines(whole / "samples.jsonl")[-4]  # four are kept of every evaluation
    assert shown.std() == pytest.approx(first["reward"], abs=0.003)
    assert list(first) == ["step", "phase", "prompt", "picture", "reward", "answer"]
    assert first["picture"].startswith("(8 x 8, mean ") and first["prompt"] == str(label)


def test_the_last_model_draws_the_last_pictures(whole: Path) -> None:
    """From the exported folder, with the key of the run: what was evaluated last is drawn again."""
    spec = af.read_spec(str(whole / "spec.yaml"), [f"model={{kind='hf',path='{whole / 'export'}'}}"])
    made = af.plan(spec)
    state = initial_state(made)
    evaluation = made.evaluation
    assert evaluation is not None
    drawn = made.medium.draw(
        made.drawn_with(state.params),
        evaluation.prompts,
        state.key.fold("evaluation"),
        evaluation.sampling,
        device=made.device,
        max_rows=5,
    )
    contrasts = [picture.std() for picture in made.medium.shown(drawn)]
    last = tiny.lines(whole / "metrics.jsonl")[-1]
    assert float(np.mean(contrasts)) == pytest.approx(last["eval/contrast"], abs=1e-6)


def test_the_exported_folder_is_one_of_diffusers(whole: Path) -> None:
    module = DiTTransformer2DModel.from_pretrained(whole / "export").eval()
    made = af.plan(af.read_spec(str(whole / "spec.yaml"), [f"model={{kind='hf',path='{whole / 'export'}'}}"]))
    state = initial_state(made)
    policy = made.model.policy
    assert isinstance(policy, DiTPolicy)
    x = af.random.normal(af.Key.of(1), torch.arange(128)).reshape(2, 1, 8, 8)
    time, labels = torch.tensor([900.0, 20.0]), torch.tensor([3, 10])
    with torch.no_grad():
        theirs = module(x, time, labels).sample
        ours = policy.velocity(state.params["actor"], x, time, labels)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_guide_draws_with_the_exported_folder_in_diffusers_what_evaluations_draw(whole: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/flow.md").read_text(encoding="utf-8")
    (code,) = (part.split("```")[0] for part in guide.split("```python\n")[1:] if "DiTTransformer2DModel" in part)
    key = af.Key.of(3)
    noise = latent_noise(key.fold("start"), torch.arange(10), (1, 8, 8))
    for shown, used in {"out/flow/export": str(whole / "export"), "torch.randn(10, 1, 8, 8)": "noise"}.items():
        assert shown in code
        code = code.replace(shown, used)
    scope: dict[str, Any] = {"noise": noise}
    exec(code, scope)
    made = af.plan(af.read_spec(str(whole / "spec.yaml"), [f"model={{kind='hf',path='{whole / 'export'}'}}"]))
    params = made.drawn_with(initial_state(made).params)
    drawn = made.medium.draw(params, range(10), key, Denoising(steps=20), device=made.device, max_rows=10)
    ours = np.stack(made.medium.shown(drawn))
    assert ours.std() > 0.1
    np.testing.assert_allclose(scope["pictures"].numpy(), ours, atol=1e-5)


@pytest.mark.parametrize("after", [3, 6])
def test_K20_a_stopped_run_continues_bit_for_bit(after: int, whole: Path, spec: Path, tmp_path: Path) -> None:
    process = tiny.popen([str(spec), "--out", str(tmp_path / "out")], tmp_path)
    kill.wait_for(process, lambda: _logged(tmp_path / "out") >= after)
    process.send_signal(signal.SIGKILL if sys.platform == "linux" else signal.SIGTERM)
    process.communicate()
    done = tiny.run(spec, tmp_path / "out", "--resume")
    assert (done.code, done.err) == (0, "")
    assert tiny.difference(whole, tmp_path / "out") is None
    assert tiny.files(whole / "pictures") == tiny.files(tmp_path / "out" / "pictures")


def _logged(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_other_pictures_are_another_run(whole: Path, spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "out", phases__grpo__steps=2).code == 0
    done = tiny.run(spec, tmp_path / "out", "--resume", phases__sft__data__0__limit=39)
    assert done.code == 2
    assert "belongs to another run: phases.sft.data.0.limit was 40 and is now 39" in done.err


def test_an_average_is_kept_evaluated_and_exported(spec: Path, tmp_path: Path) -> None:
    assert tiny.run(spec, tmp_path / "out", phases__grpo__ema={"decay": 0.5}).code == 0
    last = tiny.lines(tmp_path / "out" / "metrics.jsonl")[-1]
    assert last["eval_ema/contrast"] != last["eval/contrast"] and last["eval_ema/diversity"] > 0
    assert (tmp_path / "out/pictures/step-00000008-ema.png").exists()
    assert DiTTransformer2DModel.from_pretrained(tmp_path / "out/export_ema").config.num_layers == 2


def test_adapters_are_trained_beside_a_frozen_model(whole: Path, spec: Path, tmp_path: Path) -> None:
    """From a folder: in a model from scratch the output is 0, so that nothing before it has a gradient."""
    model = {"kind": "hf", "path": str(whole / "export")}
    text = SPEC[: SPEC.index("[model]")] + SPEC[SPEC.index("[[phases]]") :]
    tiny.write_spec(tmp_path, text)
    done = tiny.run(spec, tmp_path / "out", model=model, finetune={"kind": "lora", "rank": 2})
    assert (done.code, done.err) == (0, "")
    assert json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())["task_type"] is None
    merged = DiTTransformer2DModel.from_pretrained(tmp_path / "out/export")
    source = DiTTransformer2DModel.from_pretrained(whole / "export")
    own, before = (module.transformer_blocks[1].ff.net[2].weight for module in (merged, source))
    assert own.shape == before.shape and not torch.equal(own, before)
    assert torch.equal(merged.proj_out_2.weight, source.proj_out_2.weight)
    steps = [line for line in tiny.lines(tmp_path / "out/metrics.jsonl") if "train/grad_norm" in line]
    assert all(line["train/grad_norm"] > 0 for line in steps)


def test_guidance_is_learned_trained_with_and_evaluated_with(spec: Path, tmp_path: Path) -> None:
    values = {
        "phases__sft__algorithm__condition_dropout": 0.2,
        "phases__grpo__algorithm__denoising__guidance": 2.0,
        "evaluation__denoising": {"steps": 3, "guidance": 2.0, "solver": "unipc"},
    }
    assert tiny.run(spec, tmp_path / "whole", **values).code == 0
    assert tiny.run(spec, tmp_path / "out", phases__grpo__steps=2, **values).code == 0
    assert tiny.run(spec, tmp_path / "out", "--resume", **values).code == 0
    assert tiny.state(tmp_path / "whole") == tiny.state(tmp_path / "out")


def test_a_dry_run_shows_what_rewards_say_of_pictures(spec: Path, tmp_path: Path) -> None:
    done = tiny.run(spec, tmp_path / "out", "--dry-run")
    assert done.code == 0
    rows = af.plan(af.read_spec(str(spec))).phases[1].rows
    assert len(rows) == 20
    bright = np.mean([row["picture"] for row in rows[:16]])
    assert f"bright: 0 for an empty picture, {bright:.4f}"[:-1] in done.out
    assert "for the rows' own, on average of at most 16\n" in done.out
    assert "flow_grpo (generation + runtime_reward), 4 steps of 4 rows from 20" in done.out


# ------------------------------------------------------------------------------------ what a reward is asked


ASKED: list[tuple[list[int], list[tuple[Any, ...]]]] = []


def of_group(row: Mapping[str, Any], pictures: Sequence[np.ndarray[Any, Any]]) -> list[float]:
    ASKED.append(([row["label"]], [(p.shape, p.dtype, float(p.min()), float(p.max())) for p in pictures]))
    return [float(p.mean()) for p in pictures]


def of_text(rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    return [0.0 for _ in completions]


def test_a_reward_of_groups_gets_the_pictures_of_a_row(spec: Path, tmp_path: Path) -> None:
    ASKED.clear()
    reward = [{"kind": "function", "function": "e2e.test_flow_run:of_group"}]
    values = {"phases__sft__steps": 1, "phases__grpo__steps": 1, "phases__grpo__rewards": reward}
    assert tiny.run(spec, tmp_path / "out", **values).code == 0
    from e2e.test_flow_run import ASKED as asked  # the module that the reward is in may be another than this one

    assert len(asked) == 4, "one call for each of four prompts"
    for _, pictures in asked:
        assert len(pictures) == 4
        for shape, dtype, low, high in pictures:
            assert shape == (1, 8, 8) and dtype == np.float32 and 0 <= low <= high <= 1


# ------------------------------------------------------------------------------------ refusals

_KINDS = [kind.__struct_config__.tag for kind in get_args(AlgorithmSpec) if issubclass(kind, FlowAlgorithm)]
OF_PICTURES = f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
TEXT_DATA = [{"kind": "arithmetic", "digits": 1, "count": 4}]
FUNCTION = {"kind": "function", "function": "e2e.test_flow_run:of_text"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"phases__sft__algorithm": {"kind": "sft"}},
            f"phases.sft.algorithm: sft trains models that make text, but digits_dit makes pictures; use {OF_PICTURES}",
        ),
        (
            {"phases__sft__data": TEXT_DATA},
            "phases.sft.data.0: 'arithmetic' is not what digits_dit is trained on, which makes pictures; use digits",
        ),
        (
            {"phases__grpo__rewards": [FUNCTION]},
            "phases.grpo.rewards: the reward 'e2e.test_flow_run:of_text' judges completions, by the names of its "
            "parameters, but the model makes pictures; name a reward with the parameters (rows, pictures), (row, pictures) or "
            "(row, picture)",
        ),
        (
            {"phases__grpo__rewards": [{"kind": "model", "path": "x"}]},
            "phases.grpo.rewards.0: a reward of kind 'model' judges text, but digits_dit makes pictures; use kind 'clip' or "
            "'http', or 'function' with a function of (rows, pictures)",
        ),
        ({"tokenizer": {"kind": "byte"}}, "tokenizer: digits_dit makes pictures and has no tokens; remove this"),
        (
            {"phases__sft__batch__max_length": 12},
            "phases.sft.batch.max_length: it is about tokens, and digits_dit makes pictures; remove it",
        ),
        (
            {"evaluation__sampling": {"max_tokens": 4}},
            "evaluation.sampling: digits_dit makes pictures, which are drawn by `denoising`; remove this",
        ),
        (
            {"evaluation__rewards": [{"kind": "function", "function": "e2e.test_flow_run:of_group", "name": "diversity"}]},
            "evaluation.rewards: 'diversity' is what the distance of pictures is called; give that reward another `name`",
        ),
        (
            {"phases__grpo__algorithm__denoising": {"dynamics": "cps", "level": 1.5}},
            "phases.grpo.algorithm.denoising.level: the dynamics 'cps' takes levels up to 1, received 1.5",
        ),
        (
            {"phases__grpo__algorithm__samples": 1},
            "phases.grpo.algorithm.samples: a group of 1 has nothing to be compared with; use at least 2",
        ),
        (
            {"phases__grpo__algorithm": {"kind": "flow_grpo", "kl_space": "mean"}},
            "phases.grpo.algorithm.kl_space: without kl_coef there is no distance to measure; give kl_coef, or remove this",
        ),
        (
            {"phases__grpo__algorithm__denoising__guidance": 2.0},
            "phases.grpo.algorithm.denoising.guidance: nothing has taught digits_dit from scratch what to make without a "
            "condition; give a flow_sft phase before it a condition_dropout, or set this to 1",
        ),
        (
            {"evaluation__denoising__guidance": 2.0},
            "evaluation.denoising.guidance: nothing has taught digits_dit from scratch what to make without a "
            "condition; give a flow_sft phase before it a condition_dropout, or set this to 1",
        ),
        (
            {"model__config__sample_size": 4, "model__config__patch_size": 2},
            "phases.sft.data: digits(train):1: the picture is [1, 8, 8], but the model draws [1, 4, 4]",
        ),
        (
            {"model__config__num_embeds_ada_norm": 5},
            "phases.sft.data: digits(train):5: label 5 is none of the 5 classes of the model",
        ),
        (
            {"phases__sft__data": [{"kind": "digits", "limit": 5000}]},
            "phases.sft.data: digits(train) has 1634 pictures, but limit asks for 5000; lower it",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(
    values: dict[str, Any], sentence: str, spec: Path, tmp_path: Path
) -> None:
    assert tiny.run(spec, tmp_path / "out", **values).refused == [sentence]


def test_a_model_of_text_is_not_trained_on_pictures(tmp_path: Path) -> None:
    text = tiny.write_spec(tmp_path)
    done = tiny.run(
        text,
        tmp_path / "out",
        phases__sft__algorithm={"kind": "flow_sft"},
        phases__sft__data=[{"kind": "digits"}],
        phases__grpo__rewards=[{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}],
        evaluation__denoising={"steps": 3},
    )
    assert done.refused == [
        "phases.sft.algorithm: flow_sft trains models that make pictures, but qwen3 makes text; use sft, dpo, grpo, gspo or ppo",
        "phases.sft.data.0: 'digits' is not what qwen3 is trained on, which makes text; use jsonl, parquet, hf or arithmetic",
        "evaluation.denoising: qwen3 makes text, which is drawn by `sampling`; remove this",
    ]
    done = tiny.run(
        text,
        tmp_path / "out",
        phases__grpo__rewards=[{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}],
    )
    assert "judges pictures, by the names of its parameters, but the model makes completions" in done.err


# ------------------------------------------------------------------------------------ what a loop sees


def test_samples_of_a_phase_are_those_of_its_algorithm(spec: Path) -> None:
    made = af.plan(af.read_spec(str(spec)))
    phase = made.phases[1]
    state: TrainState = phase.algorithm.begin(initial_state(made))
    assert phase.algorithm.sample is not None and phase.prompts is not None
    prompts = made.medium.prompts(phase.prompts, [3, 7, 3], made.device)
    assert isinstance(prompts, FlowPrompts) and prompts.ids.tolist() == [3, 7, 23]
    drawn = phase.algorithm.sample(state, prompts)
    assert isinstance(drawn, Trajectory)
    assert drawn.groups.tolist() == [3] * 4 + [7] * 4 + [23] * 4
    alone = phase.algorithm.sample(state, made.medium.prompts(phase.prompts, [7], made.device))
    torch.testing.assert_close(alone.final, drawn.final[4:8], atol=1e-6, rtol=0)
