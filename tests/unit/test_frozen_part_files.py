"""Frozen parts that could not be loaded whole are refused by a plan, in a sentence, before a weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flow_pipelines
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from areno_fn.contracts.errors import ArenoError, CheckpointError, DivergenceError, ModelError, SpecError
from areno_fn.contracts.media import Request
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.plan import Plan, plan

Change = Callable[[Path], object]
MLP = "text_model.encoder.layers.1.mlp.fc1.weight"
ENCODER, VAE = "text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pipeline")
    flow_pipelines.sd3(found)
    (found / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return found


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(whole / "pipeline", tmp_path / "pipeline")
    return tmp_path / "pipeline"


def planned(folder: Path, whole: Path, **pipeline: Any) -> Plan:
    table = {
        "out": str(folder.parent / "out"),
        "device": "cpu",
        "model": {"kind": "hf", "path": str(folder), "pipeline": {"height": 16, "width": 16} | pipeline},
        "phases": [
            {
                "name": "p",
                "steps": 1,
                "algorithm": {"kind": "flow_grpo", "samples": 2, "denoising": {"steps": 2}},
                "data": [{"kind": "jsonl", "path": str(whole / "prompts.jsonl")}],
                "rewards": [{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}],
                "batch": {"rows": 1},
            }
        ],
    }
    return plan(msgspec.convert(table, RunSpec))


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def configured(name: str, **fields: Any) -> Change:
    """A JSON file with other fields."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | fields))

    return change


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    return lambda folder: save_file(change(load_file(folder / name)), folder / name, metadata={"format": "pt"})


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda held: {key: x for key, x in held.items() if key != name}


def cut(folder: Path) -> None:
    (folder / ENCODER).write_bytes((folder / ENCODER).read_bytes()[:-50])


def elsewhere(folder: Path) -> None:
    """The tensors of an index whose file is not there."""
    held = load_file(folder / ENCODER)
    (folder / ENCODER).unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(held, "none.safetensors")}
    (folder / "text_encoder/model.safetensors.index.json").write_text(json.dumps(index))


def part(name: str, library: str, class_name: str) -> Change:
    return configured("model_index.json", **{name: [library, class_name]})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (tensors(ENCODER, without(MLP)), f"no file holds {MLP!r} of the text_encoder"),
        (tensors(VAE, without("decoder.conv_out.weight")), "no file holds 'decoder.conv_out.weight' of the vae"),
        (tensors(ENCODER, lambda held: held | {MLP: held[MLP][:, 1:].contiguous()}), "but its config.json means [16, 8]"),
        (tensors(VAE, lambda held: held | {"decoder.conv_out.bias": torch.zeros(1)}), "diffusers cannot read the vae"),
        (cut, "transformers cannot read the text_encoder (Error while deserializing header"),
        (written(ENCODER, b""), "transformers cannot read the text_encoder"),
        (written(VAE, b"xx" * 100), "diffusers cannot read the vae"),
        (removed(ENCODER), "transformers cannot read the text_encoder (Error no file named model.safetensors"),
        (removed(VAE), "diffusers cannot read the vae (Error no file named"),
        (elsewhere, "none.safetensors"),
        (removed("text_encoder/config.json"), "the text_encoder has no config.json"),
        (removed("vae/config.json"), "the vae has no config.json"),
        (removed("tokenizer/tokenizer.json"), "the tokenizer has no words, for there is no tokenizer.json"),
        (written("tokenizer/tokenizer.json", b"{}"), "transformers cannot read the tokenizer"),
        (part("text_encoder", "transformers", "NoSuch"), "this version of transformers has no NoSuch"),
        (part("text_encoder", "transformers", "set_seed"), "this version of transformers has no set_seed"),
        (part("text_encoder", "transformers", "T5EncoderModel"), "of the text_encoder, which T5EncoderModel has"),
        (part("transformer", "diffusers", "FluxTransformer2DModel"), "names FluxTransformer2DModel as the transformer"),
        (configured("text_encoder/config.json", hidden_size="x"), "Field 'hidden_size' expected int, got str"),
        (configured("text_encoder/config.json", projection_dim=7), "'text_projection.weight' of the text_encoder is [6, 8]"),
        (configured("vae/config.json", scaling_factor="a"), "the vae's configuration: scaling_factor must be a number"),
        (configured("vae/config.json", scaling_factor=0.0), "scaling_factor must be above 0"),
        (configured("vae/config.json", latents_std=[1.0, 0.0]), "latents_std must be a list of numbers above 0"),
    ],
)  # fmt: skip
def test_a_part_that_could_not_be_loaded_whole_is_refused_by_the_plan(
    damage: Change, words: str, folder: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    with pytest.raises(ArenoError) as found:
        planned(folder, whole)
    assert words in str(found.value) and "\n" not in str(found.value) and len(str(found.value)) < 500
    assert capfd.readouterr().err == ""


def test_whole_parts_are_planned_and_what_more_their_files_hold_is_left(folder: Path, whole: Path) -> None:
    tensors(ENCODER, lambda held: held | {"more": torch.ones(3)})(folder)
    assert planned(folder, whole).medium.parts.materialised == ()


def test_a_part_whose_weights_changed_is_part_of_another_run(folder: Path, whole: Path, tmp_path: Path) -> None:
    usual = planned(folder, whole).identity
    (folder / "README.md").write_text("x")
    shutil.copytree(folder / "vae", tmp_path / "vae")
    assert not planned(folder, whole, parts={"vae": str(tmp_path / "vae")}).identity.differences(usual)
    tensors(ENCODER, lambda held: held | {MLP: held[MLP] + 1})(folder)
    assert planned(folder, whole).identity.differences(usual).keys() == {"model"}


@pytest.mark.parametrize("written_as", ["text_encoder", "./text_encoder_3/../text_encoder"])
def test_two_components_that_lead_to_one_folder_are_refused(written_as: str, folder: Path, whole: Path) -> None:
    with pytest.raises(SpecError, match="text_encoder and text_encoder_2 would both own .*text_encoder; every"):
        planned(folder, whole, parts={"text_encoder_2": str(folder / written_as)})


def test_what_is_not_finite_is_named_by_where_it_arose(folder: Path, whole: Path) -> None:
    medium = planned(folder, whole).medium
    latents = torch.zeros(2, *medium.adapter.latent_shape)
    with pytest.raises(DivergenceError, match="1 of 2 samples that the model drew are not finite numbers"):
        medium.shown(torch.cat([latents[:1], latents[1:] / 0]))
    with torch.no_grad():
        next(medium.parts.of(["vae"])["vae"].decoder.parameters()).fill_(float("nan"))
    with pytest.raises(DivergenceError, match="the vae made of finite latents what is not; load it in float32"):
        medium.shown(latents)
    with torch.no_grad():
        next(medium.parts.of(["text_encoder_3"])["text_encoder_3"].parameters()).fill_(float("inf"))
    with pytest.raises(DivergenceError, match="made of the prompt 'a heron' is not finite"):
        medium.conditions.of(Request(prompt="a heron"), negative=False)


def test_a_tokenizer_that_is_not_that_of_its_encoder_is_refused_in_a_sentence(folder: Path, whole: Path) -> None:
    configured("tokenizer/tokenizer_config.json", model_max_length=100)(folder)
    with pytest.raises(ModelError, match="cannot encode the prompt 'a' .* see whether each tokenizer is that of its"):
        planned(folder, whole).medium.conditions.of(Request(prompt="a"), negative=False)
    with pytest.raises(CheckpointError, match="is no folder that could be the vae"):
        planned(folder, whole, parts={"vae": "a\0b"})
