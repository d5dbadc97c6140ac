"""Runs of Wan that a specification says: two experts, both or one of them trained, and videos that begin with a video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flow_families
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan_video2video
from e2e.tiny_films import BRIGHT, FULL, LORA, phase, spec_of, stored, three
from flow_families import Tiny
from PIL import Image

from areno_fn import tree
from areno_fn.ckpt.peft import read_adapter
from areno_fn.ckpt.resume import latest
from areno_fn.contracts.errors import ArenoError
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising, RunSpec
from areno_fn.engine.plan import Plan, plan
from areno_fn.engine.session import describe, run
from areno_fn.engine.start import initial_state, resumed_state
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.recipes.algorithm import rollout_key

EXPERTS = ("transformer", "transformer_2")
PROMPTS = {"prompt": ["a heron", "a crane"], "negative_prompt": ["bad", ""]}


def reread(tiny: Tiny, folder: Path) -> Any:
    found = type(tiny.theirs).from_pretrained(folder)
    found.set_progress_bar_config(disable=True)
    return found


def ours(made: Plan, drawn_by: Denoising) -> torch.Tensor:
    """What the trained model draws for the rows of `prompts`."""
    state = resumed_state(made, latest(Path(made.spec.out) / "checkpoints"))
    rows = made.phases[-1]
    assert rows.prompts is not None
    found: torch.Tensor = made.medium.draw(
        made.finetune.view(state.params), rows.prompts, Key.of(7), drawn_by, device=torch.device("cpu"), max_rows=2
    )
    return found


def start(made: Plan) -> torch.Tensor:
    """The noise that it begins with."""
    return latent_noise(Key.of(7).fold("start"), torch.tensor([0, 1]), made.model.flow_policy.latent_shape)


def theirs(pipe: Any, tiny: Tiny, **call: Any) -> torch.Tensor:
    size = tiny.adapter.size
    given = {"height": size.height, "width": size.width, "output_type": "latent", "return_dict": False}
    drawn: torch.Tensor = pipe(**PROMPTS, **given, **call)[0]
    return drawn


def moved(before: torch.nn.Module, after: torch.nn.Module) -> set[str]:
    one, other = before.state_dict(), after.state_dict()
    assert one.keys() == other.keys()
    return {name for name, x in one.items() if not torch.equal(x, other[name])}


@pytest.mark.parametrize("finetune", [FULL, LORA], ids=["full", "lora"])
def test_two_experts_are_trained_written_and_read_again_by_diffusers(finetune: Any, tmp_path: Path) -> None:
    tiny = stored(flow_families.wan(experts=2), tmp_path)
    # of the levels 1, .857 and .602 with noise the first is that of the first expert
    phases = three(tmp_path, steps=4)
    spec = spec_of(tiny, tmp_path, phases, finetune=finetune, pipeline={"guidance_2": 2.0})
    assert f"{'parameters' if finetune is FULL else 'maps'} of transformer and transformer_2" in describe(spec)
    assert run(spec) == 0
    again = reread(tiny, tmp_path / "out/export")
    for name in EXPERTS:
        assert moved(tiny.theirs.components[name], again.components[name]), name
    made = plan(spec)
    call = {"num_frames": tiny.adapter.size.frames, "latents": start(made), "num_inference_steps": 4}
    guided = call | {"guidance_scale": 3.0, "guidance_scale_2": 2.0}
    shown = theirs(again, tiny, **guided)
    assert float((ours(made, Denoising(steps=4, guidance=3.0)) - shown).abs().max()) <= 1e-4
    assert float((theirs(again, tiny, **call, guidance_scale=3.0) - shown).abs().max()) > 1e-3
    if finetune is FULL:
        return
    adapted = reread(tiny, tmp_path / "pipeline")
    plain = theirs(adapted, tiny, **guided)
    for name in EXPERTS:
        folder = tmp_path / "out/adapter" / name
        adapted.load_lora_weights(folder, load_into_transformer_2=name == "transformer_2", adapter_name=name)
        held = read_adapter(folder)
        assert held.config.r == 2 and len(held.tensors) == 2 * 20
    assert float((theirs(adapted, tiny, **guided) - shown).abs().max()) <= 1e-5 < float((plain - shown).abs().max())


def test_one_expert_is_trained_at_its_levels_beside_one_that_stays(tmp_path: Path) -> None:
    tiny = stored(flow_families.wan(experts=2), tmp_path)
    phases = three(tmp_path, steps=4)
    spec = spec_of(tiny, tmp_path, phases, pipeline={"trained": ["transformer_2"]})
    said = describe(spec)
    assert "parameters of transformer_2\n" in said and ": 0 for an empty video, " in said
    assert run(spec) == 0
    again = reread(tiny, tmp_path / "out/export")
    assert moved(tiny.theirs.transformer_2, again.transformer_2)
    for kept in (tmp_path / "pipeline/transformer").iterdir():
        assert (tmp_path / "out/export/transformer" / kept.name).read_bytes() == kept.read_bytes()
    made = plan(spec)
    state = resumed_state(made, latest(tmp_path / "out/checkpoints"))
    assert {name.partition(".")[0] for name in state.params["actor"]} == {"transformer_2"}
    assert {name.partition(".")[0] for name in state.params["base"]} == {"transformer"}
    call = {"num_frames": tiny.adapter.size.frames, "latents": start(made), "num_inference_steps": 4}
    shown = theirs(again, tiny, **call, guidance_scale=3.0)
    assert float((ours(made, Denoising(steps=4, guidance=3.0)) - shown).abs().max()) <= 1e-4


def test_adapters_of_one_expert_begin_from_those_of_a_run_of_both(tmp_path: Path) -> None:
    tiny = stored(flow_families.wan(experts=2), tmp_path)
    sft = [phase(tmp_path, "flow_sft", 2)]
    both = spec_of(tiny, tmp_path, sft, finetune=LORA, out=str(tmp_path / "both"))
    assert run(both) == 0
    begun = {"kind": "lora", "adapter": str(tmp_path / "both/adapter")}
    high = spec_of(tiny, tmp_path, sft, finetune=begun, pipeline={"trained": ["transformer"]})
    params = plan(high).load(Key.of(0))
    before = read_adapter(tmp_path / "both/adapter/transformer")
    assert len(params["actor"]) == len(before.tensors) // 2
    for module, part in params["actor"].items():
        key = f"base_model.model.{module.removeprefix('transformer.')}.lora_A.weight"
        assert torch.equal(part.a, before.tensors[key]) and part.scale == 1.5
    assert run(high) == 0
    assert sorted(path.name for path in (tmp_path / "out/adapter").iterdir()) == ["transformer"]
    with pytest.raises(ArenoError, match=r"finetune.adapter: .*/out/adapter/transformer_2 is not there; an adapter is"):
        plan(spec_of(tiny, tmp_path, sft, finetune=begun | {"adapter": str(tmp_path / "out/adapter")}))


@pytest.mark.parametrize(
    ("finetune", "pipeline"),
    [(FULL, {}), (LORA, {}), (FULL, {"trained": ["transformer"]})],
    ids=["full", "lora", "one"],
)
def test_a_run_of_two_experts_goes_on_bit_for_bit(finetune: Any, pipeline: dict[str, Any], tmp_path: Path) -> None:
    tiny = stored(flow_families.wan(experts=2), tmp_path)

    def grpo(steps: int, out: str) -> RunSpec:
        drawn = {"steps": 5, "guidance": 2.0, "count": 2}
        phases = [phase(tmp_path, "flow_grpo", steps, samples=2, denoising=drawn)]
        return spec_of(tiny, tmp_path, phases, finetune=finetune, pipeline=pipeline, out=str(tmp_path / out))

    require_same_end(tmp_path, grpo)


def require_same_end(folder: Path, asked: Any) -> None:
    """What a run of two steps leaves, and one that was begun anew after the first, are the same bytes."""
    assert run(asked(2, "whole")) == 0
    assert run(asked(1, "parts")) == 0
    assert run(asked(2, "parts"), resume=True) == 0
    held = [path.relative_to(folder / "whole") for path in (folder / "whole").rglob("*.safetensors")]
    assert len(held) >= 5
    for path in held:
        if "step-00000001" not in path.parts:
            assert (folder / "whole" / path).read_bytes() == (folder / "parts" / path).read_bytes(), path
    made = plan(asked(2, "whole"))
    begun = made.load(Key.of(made.spec.seed))["actor"]
    ended = resumed_state(made, latest(folder / "whole/checkpoints")).params["actor"]
    assert any(not torch.equal(x, y) for x, y in zip(tree.leaves(begun), tree.leaves(ended), strict=True))


@pytest.mark.parametrize(
    ("pipeline", "algorithm", "words"),
    [
        (
            {"trained": ["vae"]}, {"kind": "flow_sft"},
            "model: pipeline: trained: 'vae' is no transformer of this wan; choose among transformer and transformer_2",
        ),
        (
            {"trained": ["transformer", "transformer"]}, {"kind": "flow_sft"},
            "model.pipeline.trained.1: 'transformer' is there twice; name it once",
        ),
        (
            {"guidance_2": 0.5}, {"kind": "flow_grpo", "denoising": {"steps": 4, "guidance": 2.0}},
            "model: pipeline: guidance_2: it must be at least 1, or 0 for that of the denoising, received 0.5",
        ),
        (
            {"guidance_2": 2.0}, {"kind": "flow_grpo", "denoising": {"steps": 4}},
            "model.pipeline.guidance_2: nothing in this run has guidance; give a denoising `guidance`, or remove this",
        ),
        (
            {"trained": ["transformer"]}, {"kind": "flow_grpo", "denoising": {"steps": 4, "noisy": [2]}},
            "step 2 is at the level 0.602, but what is trained is asked at levels from 0.875 to 1; leave it out",
        ),
        (
            {"trained": ["transformer_2"]}, {"kind": "flow_grpo", "denoising": {"steps": 2}},
            "what is trained is asked at levels from 0 to 0.875, at none of the steps that would be trained on of the levels 1, 0.",
        ),
        (
            {"trained": ["transformer_2"]}, {"kind": "flow_dpo", "until": 0.1},
            "algorithm.until: 0.1 of the way from noise to data ends at the level 0.9, above all levels at which what is trained",
        ),
        (
            {"trained": ["transformer_2"]}, {"kind": "flow_dmd2"},
            "flow_dmd2 trains at all noise levels, but model.pipeline.trained leaves some to transformer; remove that",
        ),
    ],
)  # fmt: skip
def test_what_two_experts_do_not_take_is_refused(
    pipeline: dict[str, Any], algorithm: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny = stored(flow_families.wan(experts=2), tmp_path)
    asked = phase(tmp_path, algorithm.pop("kind"), **algorithm)
    if asked["name"] == "flow_dmd2":
        asked |= {"rewards": [], "optimizers": [{"kind": "adamw", "role": role} for role in ("actor", "fake")]}
    with pytest.raises(ArenoError) as refused:
        plan(spec_of(tiny, tmp_path, [asked], pipeline=pipeline))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def given_video(folder: Path, tiny: Tiny) -> list[Any]:
    """The frames that `stored` gives every row."""
    frames = []
    for place in range(tiny.adapter.size.frames):
        with Image.open(folder / f"rows/{place + 2}.png") as image:
            frames.append(image.copy())
    return frames


@pytest.mark.parametrize("finetune", [FULL, LORA], ids=["full", "lora"])
def test_video_to_video_is_trained_written_and_read_again_by_diffusers(
    finetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = stored(flow_families.wan_video(), tmp_path, given=True)
    asked = {"data": three(tmp_path)[2]["data"], "rewards": BRIGHT}
    evaluation = asked | {"denoising": {"steps": 2, "guidance": 2.0, "strength": 0.5}}
    spec = spec_of(tiny, tmp_path, three(tmp_path, steps=4), finetune=finetune, evaluation=evaluation)
    assert run(spec) == 0
    again = reread(tiny, tmp_path / "out/export")
    assert moved(tiny.theirs.transformer, again.transformer)
    made = plan(spec)
    # the noise that diffusers adds to the video becomes ours; all else it makes for itself
    monkeypatch.setattr(pipeline_wan_video2video, "randn_tensor", lambda *_, **__: start(made))
    call = {"video": given_video(tmp_path, tiny), "num_inference_steps": 5, "guidance_scale": 3.0}
    usual = theirs(again, tiny, **call)
    assert float((ours(made, Denoising(steps=5, guidance=3.0)) - usual).abs().max()) <= 1e-4
    half = theirs(again, tiny, **call, strength=0.5)
    assert float((ours(made, Denoising(steps=5, guidance=3.0, strength=0.5)) - half).abs().max()) <= 1e-4
    assert float((half - usual).abs().max()) > 1e-2
    if finetune is LORA:
        adapted = reread(tiny, tmp_path / "pipeline")
        plain = theirs(adapted, tiny, **call)
        adapted.load_lora_weights(tmp_path / "out/adapter")
        assert float((theirs(adapted, tiny, **call) - usual).abs().max()) <= 1e-5 < float((plain - usual).abs().max())


def test_steps_of_video_to_video_are_scored_as_they_were_drawn(tmp_path: Path) -> None:
    """Of 5 steps 4 are made, the last of which has no noise; states begin near the video, and ratios are 1."""
    tiny = stored(flow_families.wan_video(), tmp_path, given=True)
    drawn_by = {"steps": 5, "guidance": 2.0}
    made = plan(spec_of(tiny, tmp_path, [phase(tmp_path, "flow_grpo", samples=2, denoising=drawn_by)]))
    algorithm = made.phases[0].algorithm
    prompts = made.medium.prompts(made.phases[0].prompts, [0, 1], torch.device("cpu"))
    mean, std = (
        torch.tensor(tiny.theirs.vae.config[f"latents_{name}"])[:, None, None, None] for name in ("mean", "std")
    )
    pixels = tiny.theirs.video_processor.preprocess_video(given_video(tmp_path, tiny), height=32, width=48)
    with torch.no_grad():
        clean = (tiny.theirs.vae.encode(pixels).latent_dist.mode() - mean) / std
    assert torch.allclose(prompts.begin, clean.expand(2, -1, -1, -1, -1), atol=1e-5)
    state = algorithm.begin(initial_state(made))
    drawn = algorithm.sample(state, prompts)
    assert drawn.schedule.steps == 4 and drawn.levels.tolist() == pytest.approx([0.7, 0.7, 0.7, 0.0])
    noise = latent_noise(rollout_key(state).fold("start"), drawn.ids, made.model.flow_policy.latent_shape)
    level = float(drawn.schedule.sigmas[0])
    assert level == pytest.approx(0.9, abs=0.01)
    assert torch.allclose(drawn.state(0), (1 - level) * clean + level * noise, atol=1e-5)
    _, metrics = algorithm.step(state, JudgedTrajectory(rollout=drawn, rewards=torch.tensor([0.0, 1.0, 0.5, 0.2])))
    assert metrics["train/ratio_max"] == 1.0


@pytest.mark.parametrize("finetune", [FULL, LORA], ids=["full", "lora"])
def test_a_run_of_video_to_video_goes_on_bit_for_bit(finetune: Any, tmp_path: Path) -> None:
    tiny = stored(flow_families.wan_video(), tmp_path, given=True)

    def grpo(steps: int, out: str) -> RunSpec:
        phases = [phase(tmp_path, "flow_grpo", steps, samples=2, denoising={"steps": 5, "guidance": 2.0, "count": 2})]
        return spec_of(tiny, tmp_path, phases, finetune=finetune, out=str(tmp_path / out))

    require_same_end(tmp_path, grpo)


@pytest.mark.parametrize(
    ("given", "edit", "words"),
    [
        (False, {}, "prompts.jsonl:1: wan does not take this row, inputs.video: it takes 1 of these, received 0"),
        (
            True, {"pipeline": {"frames": 5}},
            "prompts.jsonl:1: wan does not take this row, initial: the video must have 5 frames, as what is made has, received 9",
        ),
        (
            True, {"denoising": {"steps": 3, "strength": 0.2}},
            "phases.flow_grpo: a strength is above 0 and at most 1, and leaves a step of 3, received 0.2",
        ),
        (
            True, {"denoising": {"steps": 5, "noisy": [4]}},
            "phases.flow_grpo: algorithm.denoising.noisy: step 4 does not exist in a schedule of 4 steps; those that are made are",
        ),
        (
            True, {"denoising": {"steps": 4, "strength": 0.3}},
            "phases.flow_grpo: algorithm.denoising: one step is made, which is the last and has no noise, and no other is there",
        ),
        (
            True, {"evaluated": {"steps": 2, "strength": 0.3}},
            "evaluation.denoising: a strength is above 0 and at most 1, and leaves a step of 2, received 0.3",
        ),
        (
            True, {"kind": "flow_dmd2"},
            "flow_dmd2 trains what draws from noise, but wan begins with what it is given, initial: it is 'input'; use another",
        ),
    ],
)  # fmt: skip
def test_what_video_to_video_does_not_take_is_refused(
    given: bool, edit: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny = stored(flow_families.wan_video(), tmp_path, given=given)
    asked = phase(tmp_path, edit.get("kind", "flow_grpo"), denoising=edit.get("denoising", {"steps": 5}))
    if asked["name"] == "flow_dmd2":
        asked |= {"rewards": [], "optimizers": [{"kind": "adamw", "role": role} for role in ("actor", "fake")]}
        asked["algorithm"] = {"kind": "flow_dmd2"}
    judged = {"evaluation": {"data": asked["data"], "rewards": BRIGHT, "denoising": edit.get("evaluated", {})}}
    changes = judged if "evaluated" in edit else {}
    with pytest.raises(ArenoError) as refused:
        plan(spec_of(tiny, tmp_path, [asked], pipeline=edit.get("pipeline", {}), **changes))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_what_begins_with_noise_has_no_strength(tmp_path: Path) -> None:
    tiny = stored(flow_families.wan(), tmp_path)
    asked = phase(tmp_path, "flow_grpo", denoising={"steps": 4, "strength": 0.5})
    with pytest.raises(ArenoError) as refused:
        plan(spec_of(tiny, tmp_path, [asked]))
    right = "this wan begins with noise and makes all steps; remove it"
    assert str(refused.value) == f"phases.flow_grpo.algorithm.denoising.strength: {right}"


def test_a_single_transformer_has_no_second_guidance(tmp_path: Path) -> None:
    tiny = stored(flow_families.wan(), tmp_path)
    with pytest.raises(ArenoError, match="guidance_2: this wan has one transformer; use the guidance of the denoising"):
        plan(spec_of(tiny, tmp_path, [phase(tmp_path, "flow_sft")], pipeline={"guidance_2": 2.0}))
