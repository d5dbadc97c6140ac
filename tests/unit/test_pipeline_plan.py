"""What is refused of a pipeline before a weight of it is read, and what its contract says of each checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import flow_pipelines
import msgspec
import pytest
import torch
from PIL import Image

from areno_fn.ckpt.pipeline import is_pipeline, open_pipeline
from areno_fn.ckpt.pipeline_save import save_pipeline
from areno_fn.contracts.components import Located
from areno_fn.contracts.errors import ArenoError, CheckpointError, ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising, HFModel, PipelineSpec, RunSpec, ScratchModel
from areno_fn.engine.conditions import ConditionCache
from areno_fn.engine.model import from_folder, plan_model
from areno_fn.engine.plan import plan
from areno_fn.engine.session import describe
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.pipelines import PIPELINES
from areno_fn.world.parts import load_part

BRIGHT = [{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines, sd3, flux and kontext, and rows."""
    found = tmp_path_factory.mktemp("pipelines")
    flow_pipelines.sd3(found / "sd3")
    flow_pipelines.flux(found / "flux")
    flow_pipelines.flux(found / "kontext", "FluxKontextPipeline")
    Image.new("RGB", (16, 16)).save(found / "right.png")
    Image.new("RGB", (24, 16)).save(found / "wide.png")
    write(found / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b", "negative_prompt": "c"})
    write(found / "shown.jsonl", {"prompt": "a", "image": "right.png"}, {"prompt": "b", "image": "right.png"})
    write(found / "wide.jsonl", {"prompt": "a", "image": "right.png"}, {"prompt": "b", "image": "wide.png"})
    write(found / "given.jsonl", {"prompt": "a", "inputs": ["right.png"]})
    write(found / "given_wide.jsonl", {"prompt": "a", "inputs": ["wide.png"]})
    return found


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec(folder: Path, name: str = "sd3", **changes: Any) -> RunSpec:
    """A phase of supervised training; `data` is the name of the rows, `algorithm` and the rest as in a specification."""
    data = [{"kind": "jsonl", "path": str(folder / f"{changes.pop('data', 'shown')}.jsonl")}]
    phase = {"name": "p", "steps": 1, "algorithm": {"kind": "flow_sft"}, "data": data, "batch": {"rows": 1}}
    pipeline = {"height": 16, "width": 16} | changes.pop("pipeline", {})
    model = {"kind": "hf", "path": str(folder / name / "pipeline"), "pipeline": pipeline}
    table = {"out": str(folder / "out"), "device": "cpu", "model": model} | changes.pop("run", {})
    return msgspec.convert(table | {"phases": [phase | changes]}, RunSpec)


GRPO = {
    "algorithm": {"kind": "flow_grpo", "samples": 2, "denoising": {"steps": 2}},
    "rewards": BRIGHT,
    "data": "prompts",
}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("sd3", {"pipeline": {"height": 18}}, "pipeline: sd3 does not make 18 x 16, geometry.multiple: the height"),
        ("sd3", {"pipeline": {"width": 1024}}, "geometry.most: the width is at most 32, received 1024"),
        ("sd3", {"pipeline": {"frames": 5}}, "geometry.frames: one frame is made, received 5"),
        ("sd3", {"pipeline": {"guidance": 3.0}}, "pipeline: guidance: sd3 is told no scale, its guidance is 'classifier_free'"),
        ("sd3", {"pipeline": {"parts": {"vea": "x"}}}, "'vea' cannot be overridden; what can be is scheduler, text_encoder, "),
        ("sd3", {"pipeline": {"parts": {"vae": "/none"}}}, "/none is no folder that could be the vae"),
        ("sd3", {"data": "wide"}, "wide.jsonl:2: the image is 16 x 24, but the model makes 16 x 16, geometry"),
        ("sd3", {"data": "prompts"}, "prompts.jsonl:1: the row needs image, but has prompt"),
        ("sd3", GRPO | {"data": "given"}, "given.jsonl:1: sd3 does not take this row, inputs.image: it takes none"),
        ("kontext", GRPO, "prompts.jsonl:1: flux does not take this row, inputs.image: it takes 1 of these, received 0"),
        (
            "kontext",
            GRPO | {"data": "given_wide"},
            "inputs_like_output: the image must be 16 x 16, as what is made is, received 16 x 24",
        ),
        ("sd3", {"algorithm": {"kind": "flow_dpo"}}, "shown.jsonl:1: the row has no 'chosen'"),
        ("sd3", {"algorithm": {"kind": "sft"}}, "sft trains models that make text, but sd3 makes pictures"),
        ("sd3", {"batch": {"rows": 1, "micro_tokens": 7}}, "it is about tokens, and sd3 makes pictures"),
        ("sd3", {"run": {"tokenizer": {"kind": "byte"}}}, "tokenizer: sd3 makes pictures and has no tokens"),
    ],
)  # fmt: skip
def test_what_a_contract_does_not_admit_is_refused_before_a_weight_is_read(
    name: str, changes: dict[str, Any], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("areno_fn.world.parts.load_part", read)
    monkeypatch.setattr("areno_fn.ckpt.hf.load", read)
    with pytest.raises(ArenoError) as found:
        plan(spec(folder, name, **changes))
    assert words in str(found.value)


def test_objectives_and_guidance_that_a_contract_lacks_are_refused_by_field(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = PIPELINES["sd3"]

    def bare(pipeline: Any) -> Any:
        return attrs.evolve(family.contract(pipeline), objectives=(), guidance="none")

    monkeypatch.setitem(PIPELINES, "sd3", attrs.evolve(family, contract=bare))
    prompted = [{"kind": "jsonl", "path": str(folder / "prompts.jsonl")}]
    asked: list[tuple[dict[str, Any], str]] = [
        ({"data": "shown"}, "phases.p.algorithm: sd3 is not trained by 'sft', objectives: it supports none"),
        (
            {"algorithm": {"kind": "flow_sft", "condition_dropout": 0.1}},
            "has no negative prompts, guidance: it is 'none'",
        ),
        (
            GRPO | {"algorithm": GRPO["algorithm"] | {"denoising": {"steps": 2, "guidance": 4.5}}},
            "phases.p.algorithm.denoising.guidance: sd3 takes no classifier-free guidance, guidance: it is 'none'; use 1",
        ),
        (
            GRPO | {"algorithm": {"kind": "flow_distill", "teacher_guidance": 4.5}, "rewards": []},
            "phases.p.algorithm.teacher_guidance: sd3 takes no classifier-free guidance, guidance: it is 'none'; use 1",
        ),
        (
            GRPO | {"denoising": {"guidance": 4.5}, "run": {"evaluation": {"data": prompted, "rewards": BRIGHT}}},
            "phases.p.denoising.guidance: sd3 takes no classifier-free guidance, guidance: it is 'none'; use 1",
        ),
    ]
    for changes, words in asked:
        with pytest.raises(ArenoError) as found:
            plan(spec(folder, **changes))
        assert words in str(found.value)


def test_P8_a_teacher_takes_all_that_the_actor_takes(folder: Path) -> None:
    taught = {"kind": "flow_distill", "denoising": {"steps": 2}}

    def teach(name: str, teacher: str) -> None:
        algorithm = taught | {"teacher": str(folder / teacher / "pipeline"), "teacher_guidance": 1.0}
        plan(spec(folder, name, algorithm=algorithm, data="prompts"))

    teach("flux", "flux")
    with pytest.raises(ModelError, match="does not take all that the actor takes"):
        teach("flux", "kontext")


def test_P6_outputs_of_several_sizes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = PIPELINES["sd3"]

    def ragged(pipeline: Any) -> Any:
        return attrs.evolve(family.contract(pipeline), batching="ragged")

    monkeypatch.setitem(PIPELINES, "sd3", attrs.evolve(family, contract=ragged))
    with pytest.raises(ArenoError, match="batching: it is 'ragged', but all that a run makes has one size"):
        plan(spec(folder))


def test_data_of_another_kind_is_refused(folder: Path) -> None:
    table = msgspec.to_builtins(spec(folder))
    table["phases"][0]["data"] = [{"kind": "digits"}]
    with pytest.raises(
        ArenoError, match="'digits' has no prompts, of which sd3 makes pictures; use jsonl, parquet or hf"
    ):
        plan(msgspec.convert(table, RunSpec))


def test_a_plan_loads_no_part_and_names_what_it_will_need(folder: Path) -> None:
    assert (
        "  makes image of 16 x 16; prompts need text_encoder, text_encoder_2, tokenizer, tokenizer_2; what is made needs vae"
        in describe(spec(folder, "flux")).splitlines()
    )
    made = plan(spec(folder, "flux"))
    parts = made.medium.parts
    assert parts.materialised == ()
    made.medium.prompts((made.phases[0].examples[0].request,), [0], torch.device("cpu"))
    assert set(parts.materialised) == {"text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"}
    made.medium.shown(torch.zeros(1, *made.model.policy.latent_shape))
    assert set(parts.materialised) - {"text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"} == {"vae"}


def test_targets_are_encoded_anew_and_conditions_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(spec(folder))
    medium, phase = made.medium, made.phases[0]
    first = medium.batch(phase.examples, [0, 1], phase.spec)
    vae, said = medium.parts.of(["vae"])["vae"], medium.adapter.encode_conditions
    calls: list[str] = []
    encode = vae.encode
    monkeypatch.setattr(vae, "encode", lambda *a: calls.append("pixels") or encode(*a))
    monkeypatch.setattr(
        type(medium.adapter), "encode_conditions", lambda *a, **k: calls.append("words") or said(*a[1:], **k)
    )
    again = medium.batch(phase.examples, [0, 1], phase.spec)
    assert calls == ["pixels"] and torch.equal(first.latents, again.latents)
    assert first.latents.shape == (2, *made.model.policy.latent_shape)
    alone = medium.batch(phase.examples, [1], phase.spec)
    assert torch.equal(alone.prompts.conditions.positive["text"][0], first.prompts.conditions.positive["text"][1])


def test_latents_that_are_not_finite_are_refused(folder: Path) -> None:
    made = plan(spec(folder))
    phase, vae = made.phases[0], made.medium.parts.of(["vae"])["vae"]
    with torch.no_grad():
        next(vae.encoder.parameters()).fill_(float("nan"))
    with pytest.raises(
        ArenoError, match=r"the vae made latents \[1, 4, 8, 8\] .* finite numbers .*; load it in float32"
    ):
        made.medium.batch(phase.examples, [0], phase.spec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_parts_load_in_the_stated_dtype_and_nothing_of_them_is_trained(dtype: str, folder: Path) -> None:
    made = plan(spec(folder, pipeline={"dtype": dtype}))
    found = made.medium.parts.of(["vae", "text_encoder", "text_encoder_3", "tokenizer"])
    for name in ("vae", "text_encoder", "text_encoder_3"):
        assert {x.dtype for x in found[name].parameters()} == {getattr(torch, dtype)}, name
        assert not any(x.requires_grad for x in found[name].parameters()) and not found[name].training


def test_what_is_made_of_a_pipeline_and_where_its_parts_lie_are_its_identity(folder: Path, tmp_path: Path) -> None:
    usual = plan(spec(folder, "flux")).identity
    assert plan(spec(folder, "flux", pipeline={"guidance": 2.0})).identity.differences(usual).keys() == {"model"}
    assert plan(spec(folder, "flux", pipeline={"dtype": "bfloat16"})).identity.differences(usual).keys() == {"model"}
    shutil.copytree(folder / "flux/pipeline/vae", tmp_path / "vae")
    moved = plan(spec(folder, "flux", pipeline={"parts": {"vae": str(tmp_path / "vae")}}))
    assert not moved.identity.differences(usual)
    config = json.loads((tmp_path / "vae/config.json").read_text())
    (tmp_path / "vae/config.json").write_text(json.dumps(config | {"scaling_factor": 2.0}))
    other = plan(spec(folder, "flux", pipeline={"parts": {"vae": str(tmp_path / "vae")}}))
    assert other.identity.differences(usual).keys() == {"model"}
    assert other.medium.parts.of(["vae"])["vae"].config.scaling_factor == 2.0


def test_P8_the_contract_is_that_of_the_checkpoint(folder: Path) -> None:
    def contract(name: str, edit: Callable[[dict[str, Any]], Any] = lambda configs: None) -> Any:
        pipeline = open_pipeline(folder / name / "pipeline")
        edit(pipeline.configs)  # type: ignore[arg-type]
        return PIPELINES[name if name in PIPELINES else "flux"].contract(pipeline)

    sd3, flux, kontext = contract("sd3"), contract("flux"), contract("kontext")
    assert (sd3.geometry.multiple, sd3.geometry.most, str(sd3.geometry.default)) == (4, 32, "16 x 16")
    assert contract("sd3", lambda c: c["transformer"].update(pos_embed_max_size=16)).geometry.most == 64
    assert (flux.guidance, flux.guidance_default, flux.geometry.multiple) == ("both", 3.5, 4)
    schnell = contract("flux", lambda c: c["transformer"].update(guidance_embeds=False))
    assert (schnell.guidance, schnell.guidance_default) == ("classifier_free", 0)
    assert schnell.narrows(flux) and not flux.narrows(kontext)
    assert kontext.inputs.certain and kontext.inputs_like_output and not flux.inputs.rules
    assert len({sd3.digest, flux.digest, kontext.digest, schnell.digest}) == 4
    with pytest.raises(ModelError, match="packs latents two by two into 16 channels and gets as many back"):
        contract("flux", lambda c: c["transformer"].update(out_channels=8))


@pytest.mark.parametrize(
    ("config", "even", "expected"),
    [
        ({"shift": 3.0}, False, (3.0, 3 / 1002, None)),
        ({"shift": 3.0}, True, (3.0, None, None)),
        ({"use_dynamic_shifting": True}, True, (2.718281828459045**0.5, None, None)),
        ({"use_dynamic_shifting": True, "max_shift": 0.5}, False, (2.718281828459045**0.5, 0.001, None)),
        ({"shift_terminal": 0.02}, True, (1.0, None, 0.02)),
    ],
)
def test_schedulers_are_read_as_noise_levels(config: dict[str, Any], even: bool, expected: Any) -> None:
    found = euler_levels(config, 256, even=even)
    assert (found.shift, found.lowest, found.terminal) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_karras_sigmas": True}, "use_karras_sigmas is True, which is not supported"),
        ({"time_shift_type": "linear"}, "time_shift_type is 'linear', which is not supported"),
        ({"num_train_timesteps": 100}, "num_train_timesteps is 100, which is not supported"),
        ({"speed": 2}, "the field 'speed' is unknown"),
    ],
)
def test_schedulers_that_space_levels_otherwise_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        euler_levels(config, 256, even=True)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[]", "holds a JSON list, it must be an object"),
        ("{}", "_class_name is None, it must be that of a pipeline"),
        ('{"_class_name": "P", "vae": ["diffusers"]}', "vae is ['diffusers'], it must be a library and a class"),
        (
            '{"_class_name": "P", "vae": ["my.own", "V"]}',
            "vae is a V of 'my.own', but parts are read by transformers, diffusers, or one of",
        ),
        ('{"_class_name": "P", "vae": ["diffusers", "V"]}', "has no folder 'vae', which model_index.json names"),
    ],
)
def test_a_damaged_pipeline_folder_is_refused(index: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(index)
    assert is_pipeline(tmp_path) and not is_pipeline(tmp_path / "none") and not is_pipeline("\0")
    with pytest.raises(CheckpointError) as found:
        open_pipeline(tmp_path)
    assert words in str(found.value)


def test_pipelines_and_families_that_are_not_known_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(ModelError, match="is 'OtherPipeline', but the pipelines known here are"):
        from_folder(HFModel(path=str(tmp_path)))
    with pytest.raises(ModelError, match="holds a SD3Transformer2DModel alone; give the folder of the pipeline"):
        from_folder(HFModel(path=str(folder / "sd3/pipeline/transformer")))
    for family, words in (
        ("typo", "family: there is no 'typo'; those of text are llama, qwen2, qwen3, those of pictures digits_dit"),
        ("sd3", "family: 'sd3' is trained from a pipeline folder of diffusers; use kind 'hf'"),
    ):
        with pytest.raises(ModelError, match=words):
            plan_model(RunSpec(model=ScratchModel(family=family, config={}), phases=[]))


def test_a_setting_of_pipelines_is_for_pipelines(folder: Path) -> None:
    asked = spec(folder)
    for path, words in (
        (folder / "sd3/pipeline/text_encoder", "text_encoder is a part of the pipeline folder .*/pipeline; give that"),
        (
            folder / "sd3",
            "/sd3 holds no model_index.json, so it is no pipeline folder of diffusers; give such a folder",
        ),
        (folder / "none", "path: '.*/none' is no folder here; .*, so download the model first and give its folder"),
        ("stabilityai/some-model", "path: 'stabilityai/some-model' is no folder here"),
    ):
        model = HFModel(path=str(path), pipeline=asked.model.pipeline)
        with pytest.raises(ArenoError, match=words):
            plan(msgspec.structs.replace(asked, model=model))


def test_46_a_part_whose_library_or_class_is_missing_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(class_name: str, library: str = "diffusers", where: str = "vae") -> Located:
        return Located(name="vae", kind="model", folder=where, library=library, class_name=class_name)

    root, cpu = str(folder / "sd3/pipeline"), torch.device("cpu")
    with pytest.raises(ModelError, match="this version of diffusers has no NoSuchVAE, which reads the vae"):
        load_part(part("NoSuchVAE"), root, None, cpu)
    with pytest.raises(CheckpointError, match="none: the vae has no config.json"):
        load_part(part("AutoencoderKL", where="none"), root, None, cpu)
    with pytest.raises(
        ModelError, match="the vae is read by 'mine', which is neither transformers nor diffusers, nor one of"
    ):
        load_part(part("V", library="mine"), root, None, cpu)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(
        ModelError, match=r"the vae is read by diffusers, which is not installed; pip install 'areno-fn\[flow\]'"
    ):
        load_part(part("AutoencoderKL"), root, None, cpu)
    with pytest.raises(
        ModelError, match=r"is a module of diffusers, which is not installed; pip install 'areno-fn\[flow\]'"
    ):
        from_folder(HFModel(path=root))


def test_a_pipeline_is_written_whole_and_over_nothing_else(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "sd3/pipeline", tmp_path / "out"
    parts = {"vae": source / "vae", "tokenizer": source / "tokenizer"}

    def trained(path: Path) -> None:
        path.mkdir()
        (path / "new").write_text("x")

    for _ in range(2):
        save_pipeline(out, source, parts, {"transformer": trained})
        found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        assert found == {
            "model_index.json", "transformer/new", "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
            "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
        }  # fmt: skip
    (out / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds mine.txt, which would be lost"):
        save_pipeline(out, source, parts, {"transformer": trained})

    def fails(path: Path) -> None:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        save_pipeline(tmp_path / "other", source, parts, {"transformer": fails})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_66_the_guide_shows_a_specification() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/flow.md").read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```toml\n")[1:] if "model_index.json" in part]
    found = msgspec.convert(tomllib.loads(block.split("```")[0]), RunSpec)
    assert found.model.pipeline == PipelineSpec(height=512, width=512, dtype="bfloat16")
    assert found.phases[0].algorithm.denoising.guidance == 4.5


def test_an_evaluation_draws_the_same_however_much_is_drawn_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(spec(folder, **GRPO))
    medium, prompts, params = made.medium, made.phases[0].prompts, made.finetune.view(made.load(Key.of(0)))
    asked: list[int] = []
    stacked = ConditionCache.stacked
    monkeypatch.setattr(ConditionCache, "stacked", lambda *a, **k: asked.append(len(a[1])) or stacked(*a, **k))

    def drawn(most: int) -> torch.Tensor:
        return medium.draw(params, prompts * 2, Key.of(1), Denoising(steps=2), device=made.device, max_rows=most)

    whole, parts = drawn(8), drawn(3)
    assert asked == [4, 3, 1]  # no more is on the device than is drawn for at once
    assert whole.shape == parts.shape and torch.allclose(whole, parts, atol=1e-5)
    assert not torch.equal(whole[0], whole[2])  # one request twice is drawn twice
