"""Runs of tiny pipelines of diffusers: trained in full and by adapters, written, and read again by diffusers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flow_families
import flow_pipelines
import numpy as np
import pytest
import torch
from flow_models import numbers
from msgspec import structs
from PIL import Image

from areno_fn import tree
from areno_fn.ckpt.peft import (
    DIFFUSERS,
    AdapterConfig,
    key_of,
    open_adapter,
    read_adapter,
    write_adapter,
)
from areno_fn.ckpt.resume import latest
from areno_fn.contracts.flow import Process
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import AdamWSpec, Denoising, FewSteps, FlowDMD2, RunSpec
from areno_fn.engine.plan import plan
from areno_fn.engine.session import run
from areno_fn.engine.specfile import read
from areno_fn.engine.start import resumed_state
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.recipes.flow_drawing import schedule_of

SIDE = 16
GUIDANCE = 3.5
MAKERS: dict[str, Callable[[Path], Any]] = {
    "sd3": flow_pipelines.sd3,
    "flux": flow_pipelines.flux,
    "kontext": lambda folder: flow_pipelines.flux(folder, "FluxKontextPipeline"),
}
SPEC = """name = "tiny"
out = "{out}"
device = "cpu"
model = {{ kind = "hf", path = "{pipeline}", pipeline = {{ height = {height}, width = {width}, frames = {frames} }} }}
finetune = {finetune}

[[phases]]
name = "sft"
steps = 1
algorithm = {{ kind = "flow_sft" }}
data = [{{ kind = "jsonl", path = "{rows}/shown.jsonl" }}]
batch = {{ rows = 2 }}
optimizers = [{{ kind = "adamw", lr = 0.003 }}]

[[phases]]
name = "dpo"
steps = 1
algorithm = {{ kind = "flow_dpo", beta = 10.0 }}
data = [{{ kind = "jsonl", path = "{rows}/pairs.jsonl" }}]
batch = {{ rows = 2 }}
optimizers = [{{ kind = "adamw", lr = 0.003 }}]

[[phases]]
name = "grpo"
steps = 1
algorithm = {{ kind = "flow_grpo", samples = 2, kl_coef = 0.1, denoising = {{ steps = 2, guidance = {guidance} }} }}
data = [{{ kind = "jsonl", path = "{rows}/prompts.jsonl" }}]
batch = {{ rows = 2 }}
remat = {remat}
optimizers = [{{ kind = "adamw", lr = 0.003 }}]
rewards = [{{ kind = "function", function = "areno_fn.world.picture_rewards:brightness" }}]

[evaluation]
data = [{{ kind = "jsonl", path = "{rows}/prompts.jsonl" }}]
rewards = [{{ kind = "function", function = "areno_fn.world.picture_rewards:contrast" }}]
denoising = {{ steps = 2, guidance = {guidance} }}

[log]
tensorboard = false
"""
SQUARE = Size(height=SIDE, width=SIDE)
FULL, LORA = '{ kind = "full" }', '{ kind = "lora", rank = 2 }'


def write_rows(folder: Path, given: bool) -> None:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3)).astype(np.uint8)
    for place, one in enumerate(pixels):
        Image.fromarray(one).save(folder / f"{place}.png")
    inputs = {"inputs": ["2.png"]} if given else {}
    shown = [
        {"prompt": "a cat", "image": "0.png"} | inputs,
        {"prompt": "a dog", "negative_prompt": "bad", "image": (pixels[1] / 255).transpose(2, 0, 1).tolist()} | inputs,
    ]
    prompts = [{"prompt": "a cat"} | inputs, {"prompt": "a dog", "negative_prompt": "bad"} | inputs]
    pairs = [{"prompt": "a cat", "chosen": f"{one}.png", "rejected": f"{1 - one}.png"} | inputs for one in (0, 1)]
    for name, rows in (("shown", shown), ("prompts", prompts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(folder: Path, finetune: str, size: Size = SQUARE, *, remat: bool = False, guidance: float = 2.0) -> RunSpec:
    text = SPEC.format(
        out=folder / "out", pipeline=folder / "pipeline", finetune=finetune, rows=folder / "rows", guidance=guidance,
        height=size.height, width=size.width, frames=size.frames, remat=int(remat),
    )  # fmt: skip
    (folder / "spec.toml").write_text(text)
    return read(folder / "spec.toml")


@pytest.mark.parametrize(
    ("name", "finetune"), [("sd3", FULL), ("sd3", LORA), ("flux", FULL), ("flux", LORA), ("kontext", LORA)]
)
def test_a_pipeline_is_trained_written_and_read_again_by_diffusers(name: str, finetune: str, tmp_path: Path) -> None:
    theirs = MAKERS[name](tmp_path)
    given = name == "kontext"
    write_rows(tmp_path / "rows", given=given)
    spec = spec_of(tmp_path, finetune, remat=name == "flux")
    assert run(spec) == 0
    out = tmp_path / "out"
    again = type(theirs).from_pretrained(out / "export")
    again.set_progress_bar_config(disable=True)
    before, after = theirs.transformer.state_dict(), again.transformer.state_dict()
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and "pos_embed.pos_embed" not in moved

    made = plan(spec)
    state = resumed_state(made, latest(out / "checkpoints"))
    view, adapter = made.finetune.view(state.params), made.model.policy
    key, schedule = Key.of(7), schedule_of(Denoising(steps=3), adapter.levels)
    asked = made.medium.prompts(made.evaluation.prompts, [0, 1], torch.device("cpu"))
    ours = flow_sampler(adapter, Process(dynamics="ode"))(view, asked, key, schedule, torch.zeros(3)).final
    with Image.open(tmp_path / "rows/2.png") as image:
        call = {"image": [image.copy()] * 2, "_auto_resize": False, "max_area": SIDE * SIDE}

    def draw(pipe: Any) -> torch.Tensor:
        drawn: torch.Tensor = pipe(
            prompt=["a cat", "a dog"], height=SIDE, width=SIDE, num_inference_steps=3, output_type="latent",
            latents=latent_noise(key.fold("start"), asked.ids, adapter.latent_shape), return_dict=False,
            guidance_scale=1.0 if name == "sd3" else GUIDANCE, **(call if given else {}),
        )[0]  # fmt: skip
        return drawn

    shown = draw(again)
    assert float((ours - shown).abs().max()) <= 1e-4
    if finetune == LORA:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(theirs.transformer, out / "adapter").merge_and_unload()
        for path, weight in adapted.state_dict().items():
            assert torch.allclose(weight, after[path], atol=1e-6), path
        loaded = type(theirs).from_pretrained(tmp_path / "pipeline")
        loaded.set_progress_bar_config(disable=True)
        plain = draw(loaded)
        loaded.load_lora_weights(out / "adapter")
        require_loaded(loaded.transformer, out / "adapter")
        assert float((draw(loaded) - shown).abs().max()) <= 1e-5 < float((plain - shown).abs().max())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {"sft", "dpo", "grpo"} <= {line.get("phase") for line in metrics}
    assert (out / "pictures").is_dir()


def require_loaded(transformer: Any, folder: Path) -> None:
    """Every matrix of the folder is in diffusers' module, bit for bit, and nothing else, at the scale that was trained."""
    from peft import get_peft_model_state_dict

    stored = read_adapter(folder)
    held = get_peft_model_state_dict(transformer, adapter_name="default_0", save_embedding_layers=False)
    assert {key.removeprefix("base_model.model.") for key in stored.tensors} == held.keys()
    assert all(torch.equal(held[key.removeprefix("base_model.model.")], x) for key, x in stored.tensors.items())
    scales = {path: part.scaling["default_0"] for path, part in transformer.named_modules() if hasattr(part, "scaling")}
    assert scales == {path: stored.config.scale(path) for path in scales} and 1.0 not in scales.values()


def test_the_guide_loads_an_adapter_with_diffusers(tmp_path: Path) -> None:
    """From an adapter whose scale is 3, and whose last module has a rank and an alpha of its own."""
    from peft import get_peft_model_state_dict

    theirs = flow_pipelines.sd3(tmp_path)
    own = "transformer_blocks.0.attn.to_v"
    config = AdapterConfig(
        r=2, lora_alpha=6.0, target_modules=("to_q", "to_v"), rank_pattern={own: 3}, alpha_pattern={own: 6.0}
    )
    tensors = {}
    for module, part in theirs.transformer.named_modules():
        if module.rpartition(".")[2] in config.target_modules:
            rank = config.rank(module)
            tensors[key_of(module, "A")] = numbers(f"{module}.a", rank, part.in_features, scale=0.3)
            tensors[key_of(module, "B")] = numbers(f"{module}.b", part.out_features, rank, scale=0.3)
    folder = write_adapter(tmp_path / "adapter", config, tensors, "transformer")
    guide = (Path(__file__).parents[2] / "docs/flow.md").read_text(encoding="utf-8")
    (code,) = (part.split("```")[0] for part in guide.split("```python\n")[1:] if "load_lora_weights" in part)
    changed = {
        "models/stable-diffusion-3.5-medium": str(tmp_path / "pipeline"), "out/adapter": str(folder),
        "512": str(SIDE), "bfloat16": "float32",
    }  # fmt: skip
    for shown, used in changed.items():
        assert shown in code
        code = code.replace(shown, used)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["picture"].size == (SIDE, SIDE)
    require_loaded(scope["pipe"].transformer, folder)
    adapted = scope["pipe"].transformer.get_submodule(own)
    assert adapted.scaling["default_0"] == 2.0 and adapted.r["default_0"] == 3

    scope["pipe"].save_lora_weights(
        tmp_path / "theirs",
        transformer_lora_layers=get_peft_model_state_dict(
            scope["pipe"].transformer, adapter_name="default_0", save_embedding_layers=False
        ),
        transformer_lora_adapter_metadata=scope["pipe"].transformer.peft_config["default_0"].to_dict(),
    )
    for alone in (tmp_path / "theirs", tmp_path / "alone"):
        alone.mkdir(exist_ok=True)
        if alone.name == "alone":
            shutil.copy(folder / DIFFUSERS, alone)
        again = read_adapter(alone)
        assert again.tensors.keys() == tensors.keys()
        assert all(torch.equal(again.tensors[key], x) for key, x in tensors.items())
        assert {module: again.config.scale(module) for module in open_adapter(folder).modules} == {
            module: config.scale(module) for module in open_adapter(folder).modules
        }


def test_a_run_that_goes_on_ends_where_one_ends_that_never_stopped(tmp_path: Path) -> None:
    flow_pipelines.sd3(tmp_path)
    write_rows(tmp_path / "rows", given=False)

    def grpo(steps: int, out: str) -> RunSpec:
        whole = spec_of(tmp_path, LORA)
        phase = structs.replace(whole.phases[2], steps=steps)
        return structs.replace(whole, phases=[phase], evaluation=None, out=str(tmp_path / out))

    assert run(grpo(2, "whole")) == 0
    assert run(grpo(1, "parts")) == 0
    assert run(grpo(2, "parts"), resume=True) == 0
    ends = [tmp_path / out / "adapter" / "adapter_model.safetensors" for out in ("whole", "parts")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.parametrize("name", ["Flux.2 dev", "Flux.2 Klein", "Qwen-Image", "Z-Image"])
def test_large_families_are_trained_written_and_read_again(name: str, tmp_path: Path) -> None:
    case = flow_families.FAMILIES[name]()
    case.theirs.save_pretrained(tmp_path / "pipeline")
    write_rows(tmp_path / "rows", given=False)
    spec = spec_of(tmp_path, LORA, guidance=1.0 if name == "Flux.2 dev" else 2.0)
    if name == "Flux.2 dev":
        for rows in ("shown", "prompts"):  # it takes no negative prompts
            path = tmp_path / "rows" / f"{rows}.jsonl"
            path.write_text(
                path.read_text().replace('"negative_prompt": "bad", ', "").replace(', "negative_prompt": "bad"', "")
            )
    assert run(spec) == 0
    again = type(case.theirs).from_pretrained(tmp_path / "out" / "export")
    made = plan(spec)
    state = resumed_state(made, latest(tmp_path / "out" / "checkpoints"))
    merged = made.finetune.merged(state.params, lambda _: torch.float32)
    stored = again.transformer.state_dict()
    assert merged.keys() == stored.keys()
    assert all(torch.allclose(merged[path], weight, atol=1e-6) for path, weight in stored.items())
    loaded = type(case.theirs).from_pretrained(tmp_path / "pipeline")
    loaded.load_lora_weights(tmp_path / "out" / "adapter")
    require_loaded(loaded.transformer, tmp_path / "out" / "adapter")
    before = case.transformers["transformer"].state_dict()
    assert any(not torch.equal(weight, before[path]) for path, weight in stored.items())
    for part in ("vae", "text_encoder"):
        kept = case.theirs.components[part].state_dict()
        assert all(torch.equal(x, kept[path]) for path, x in again.components[part].state_dict().items())


@pytest.mark.parametrize("name", ["wan", "ltx2"])
def test_videos_and_sound_are_trained_from_a_specification(name: str, tmp_path: Path) -> None:
    tiny = flow_families.wan() if name == "wan" else flow_families.ltx2("2")
    tiny.theirs.save_pretrained(tmp_path / "pipeline")
    size = tiny.adapter.size
    (tmp_path / "rows").mkdir()
    for shade in range(size.frames + 1):
        Image.new("RGB", (size.width, size.height), (20 * shade,) * 3).save(tmp_path / f"rows/{shade}.png")
    sound = {} if name == "wan" else {"audio": [[0.25, -0.25] * 3960] * 2}
    films = [{"video": [f"{place + first}.png" for place in range(size.frames)]} | sound for first in (0, 1)]
    one, other = (film["video"] for film in films) if name == "wan" else films
    rows = {
        "shown": [{"prompt": "a heron"} | film for film in films],
        "pairs": [{"prompt": "a heron", "chosen": one, "rejected": other}] * 2,
        "prompts": [{"prompt": "a heron"}, {"prompt": "a crane"}],
    }
    for key, lines in rows.items():
        (tmp_path / f"rows/{key}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert run(spec_of(tmp_path, LORA, size)) == 0
    loaded = type(tiny.theirs).from_pretrained(tmp_path / "pipeline")
    loaded.load_lora_weights(tmp_path / "out/adapter")
    require_loaded(loaded.transformer, tmp_path / "out/adapter")
    again = type(tiny.theirs.transformer).from_pretrained(tmp_path / "out/export/transformer")
    before, after = tiny.theirs.transformer.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[key], after[key]) for key in before)
    with Image.open(next((tmp_path / "out/pictures").iterdir())) as sheet:
        # two prompts below each other, a frame of each, four times as large
        assert sheet.width > 4 * size.width and sheet.height > 8 * size.height


@pytest.mark.parametrize(("finetune", "teacher"), [(FULL, False), (LORA, True)])
def test_a_generator_of_few_steps_is_made_of_a_pipeline(finetune: str, teacher: bool, tmp_path: Path) -> None:
    """Its fake moves beside it, tables that are stored stay, and a teacher may be a pipeline's folder too."""
    theirs = flow_pipelines.sd3(tmp_path)
    write_rows(tmp_path / "rows", given=False)
    whole = spec_of(tmp_path, finetune)
    algorithm = FlowDMD2(
        fake_updates=2,
        teacher_guidance=2.0,
        denoising=FewSteps(steps=2),
        teacher=str(tmp_path / "pipeline") if teacher else "",
    )
    phase = structs.replace(
        whole.phases[2],
        algorithm=algorithm,
        rewards=[],
        steps=2,
        optimizers=[AdamWSpec(role=role, lr=0.003) for role in ("actor", "fake")],
        batch=structs.replace(whole.phases[2].batch, micro_rows=1),
    )
    spec = structs.replace(whole, phases=[phase], export=structs.replace(whole.export, roles=["fake"]))
    assert run(spec) == 0
    state = resumed_state(plan(spec), latest(tmp_path / "out/checkpoints"))
    assert set(state.params) == {"actor", "fake", "base"} | ({"teacher"} if teacher else set())
    assert not tree.equal(state.params["actor"], state.params["fake"])
    again = type(theirs).from_pretrained(tmp_path / "out/export").transformer.state_dict()
    before = theirs.transformer.state_dict()
    moved = {key for key in before if not torch.equal(before[key], again[key])}
    assert moved and "pos_embed.pos_embed" not in moved
    fake = type(theirs.transformer).from_pretrained(tmp_path / "out/fake").state_dict()
    assert fake.keys() == before.keys() and torch.equal(fake["pos_embed.pos_embed"], before["pos_embed.pos_embed"])
    if teacher:
        assert all(torch.equal(state.params["teacher"][key], value) for key, value in before.items())
