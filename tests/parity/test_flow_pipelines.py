"""Families of pipelines against diffusers' own: velocities, conditions, decoded pictures, and whole sampled latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import flow_pipelines
import pytest
import torch
from flow_models import numbers

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.adapter import LowRank
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.flow_adapter import FlowAdapter, Pipeline, Setting
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.key import Key
from areno_fn.contracts.media import Media, Request
from areno_fn.models import adapters
from areno_fn.models.adapter_sites import chosen
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.pipelines import pipeline_family
from areno_fn.steps.flow.noise import latent_noise, noise_levels
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.testing import laws

SIZE = Size(height=16, width=24)
PROMPTS = ("a cat", "two dogs and more words than fit")
AWAY = ("", "bad")
STEPS = 3
GIVEN = numbers("given", 2, 3, SIZE.height, SIZE.width).sigmoid()
"""A picture for each prompt, where one is edited."""


@attrs.frozen
class Case:
    """A tiny pipeline, and what its own call takes beside prompts."""

    theirs: Any
    adapter: FlowAdapter
    params: dict[str, torch.Tensor]
    parts: dict[str, Any]
    guidance: float
    call: dict[str, Any]


def described(pipeline: Any) -> Pipeline:
    index = {
        name: None if part is None else (type(part).__module__.split(".")[0], type(part).__name__)
        for name, part in pipeline.components.items()
    }
    configs = {
        name: {**getattr(part, "config", {})}
        for name, part in pipeline.components.items()
        if part is not None and isinstance(getattr(part, "config", None), dict)
    }
    for name in ("transformer", "scheduler", "vae"):
        configs[name]["_class_name"] = type(pipeline.components[name]).__name__
    return Pipeline(class_name=type(pipeline).__name__, index=index, options={}, configs=configs)


def case_of(pipeline: Any, *, guidance: float, call: dict[str, Any], embedded: float = 0.0) -> Case:
    given = described(pipeline)
    family = pipeline_family(given.class_name)
    parts = {name: part for name, part in pipeline.components.items() if part is not None and name != "transformer"}
    return Case(
        theirs=pipeline,
        adapter=family.adapter(given, Setting(size=SIZE, guidance=embedded)),
        params=dict(pipeline.transformer.state_dict()),
        parts=parts,
        guidance=guidance,
        call=call,
    )


def sd3(folder: Path) -> Case:
    return case_of(
        flow_pipelines.sd3(folder), guidance=4.5, call={"guidance_scale": 4.5, "negative_prompt": list(AWAY)}
    )


def sd3_without_t5(folder: Path) -> Case:
    made = flow_pipelines.sd3(folder, t5=False)
    return case_of(made, guidance=2.0, call={"guidance_scale": 2.0, "negative_prompt": list(AWAY)})


def flux(folder: Path) -> Case:
    return case_of(flow_pipelines.flux(folder), guidance=1.0, call={"guidance_scale": 2.5}, embedded=2.5)


def flux_schnell(folder: Path) -> Case:
    made = flow_pipelines.flux(folder, guidance_embeds=False)
    return case_of(made, guidance=3.0, call={"true_cfg_scale": 3.0, "negative_prompt": list(AWAY)})


def kontext(folder: Path) -> Case:
    made = flow_pipelines.flux(folder, "FluxKontextPipeline")
    call = {"guidance_scale": 2.5, "image": GIVEN, "_auto_resize": False, "true_cfg_scale": 2.0}
    call |= {"negative_prompt": list(AWAY), "max_area": SIZE.height * SIZE.width}
    return case_of(made, guidance=2.0, call=call, embedded=2.5)


CASES: dict[str, Callable[[Path], Case]] = {
    "sd3": sd3,
    "sd3 without T5": sd3_without_t5,
    "flux": flux,
    "flux schnell": flux_schnell,
    "kontext": kontext,
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp("pipeline"))


def conditions(case: Case) -> Conditions:
    takes = bool(case.adapter.contract.inputs.rules)
    given = [(Media(type="image", data=one),) if takes else () for one in GIVEN]
    requests = [Request(prompt=p, negative_prompt=n, media=m) for p, n, m in zip(PROMPTS, AWAY, given, strict=True)]
    with torch.no_grad():
        each = [case.adapter.encode_conditions(case.parts, one, negative=case.guidance > 1) for one in requests]
    return tree.map(lambda *rows: torch.cat(rows), *each)


def test_the_whole_pipeline_samples_the_same_latents(case: Case) -> None:
    adapter, ids, key = case.adapter, torch.tensor([4, 7]), Key.of(3)
    levels = adapter.levels
    schedule = flow_match(STEPS, shift=levels.shift, lowest=levels.lowest, terminal=levels.terminal)
    sample = flow_sampler(adapter, Process(dynamics="ode", guidance=case.guidance, solver=levels.solver))
    ours = sample(case.params, FlowPrompts(conditions=conditions(case), ids=ids), key, schedule, torch.zeros(STEPS))
    start = latent_noise(key.fold("start"), ids, adapter.latent_shape)
    made = case.theirs(
        prompt=list(PROMPTS), height=SIZE.height, width=SIZE.width, num_inference_steps=STEPS, latents=start,
        output_type="latent", return_dict=False, **case.call,
    )[0]  # fmt: skip
    assert ours.final.shape == made.shape == (2, *adapter.latent_shape)
    assert float((ours.final - start).abs().max()) > 0.1
    assert float((ours.final - made).abs().max()) <= 1e-4


def test_what_is_decoded_is_what_the_pipeline_shows(case: Case) -> None:
    latents = numbers("latents", 2, *case.adapter.latent_shape)
    with torch.no_grad():
        ours = case.adapter.decode(case.parts, latents)["image"]
    shown = case.theirs(
        prompt=list(PROMPTS), height=SIZE.height, width=SIZE.width, num_inference_steps=1, latents=latents,
        output_type="pt", return_dict=False, callback_on_step_end=lambda *_: {"latents": latents}, **case.call,
    )[0]  # fmt: skip
    assert ours.shape == shown.shape == (2, 3, SIZE.height, SIZE.width)
    assert float(ours.std()) > 0.05
    assert float((ours - shown.float()).abs().max()) <= 1e-5


def test_41_pictures_are_encoded_as_the_autoencoder_expects_them(case: Case) -> None:
    vae, size = case.theirs.vae, (SIZE.height, SIZE.width)
    for byte in (0, 127, 255):
        picture = torch.full((1, 3, *size), byte, dtype=torch.uint8).float() / 255
        with torch.no_grad():
            ours = case.adapter.encode_output(case.parts, {"image": picture})
            pixels = case.theirs.image_processor.preprocess(picture, *size)
            assert float((pixels - (2 * byte / 255 - 1)).abs().max()) <= 1e-6
            plain = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
        assert ours.shape == (1, *case.adapter.latent_shape)
        assert torch.allclose(ours.flatten().sort().values, plain.flatten().sort().values, atol=1e-5)
    with pytest.raises(ModelError, match=r"the pictures must be \[B, 3, 16, 24\], received \[1, 3, 8, 8\]"):
        case.adapter.encode_output(case.parts, {"image": torch.zeros(1, 3, 8, 8)})


def test_an_adapted_velocity_is_that_of_merged_weights(case: Case) -> None:
    family = FLOW_LAYOUTS[case.adapter.contract.family]
    named = {"_class_name": type(case.theirs.transformer).__name__}
    sites = chosen(family.layout(family.config_from_hf(dict(case.theirs.transformer.config) | named)))
    lora = {
        module: LowRank(
            a=numbers(f"{module}a", 3, part.a.shape[1]), b=numbers(f"{module}b", part.b.shape[0], 3), scale=0.05
        )
        for module, part in adapters.shapes(sites, lambda _: 3, lambda _: 0.05).items()
    }
    view = adapters.adapt(case.params, lora, sites)
    given, state, time = conditions(case), numbers("state", 2, *case.adapter.latent_shape), torch.tensor([800.0, 20.0])
    ask = case.adapter.velocity
    with torch.no_grad():
        ours = ask(view, state, time, given.positive)
        merged = ask(adapters.merge(view), state, time, given.positive)
        plain = ask(case.params, state, time, given.positive)
    assert float((ours - plain).abs().max()) > 1e-3
    assert float((ours - merged).abs().max()) <= 1e-5 * max(1.0, float(merged.abs().max()))


def test_parameters_of_other_shapes_share_no_module_state(case: Case) -> None:
    given, state, time = conditions(case), numbers("state", 2, *case.adapter.latent_shape), torch.tensor([800.0, 20.0])
    twice = {name: 2 * x for name, x in case.params.items()}
    with torch.no_grad():
        before = case.adapter.velocity(case.params, state, time, given.positive)
        other = case.adapter.velocity(twice, state, time, given.positive)
        after = case.adapter.velocity(case.params, state, time, given.positive)
    assert torch.equal(before, after) and not torch.equal(before, other)


def test_the_velocity_is_that_of_the_module_and_so_is_its_gradient(case: Case) -> None:
    given, state, time = conditions(case), numbers("state", 2, *case.adapter.latent_shape), torch.tensor([800.0, 20.0])
    direction = numbers("direction", *state.shape)

    def along(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return (case.adapter.velocity(params, state, time, given.positive) * direction).sum()

    module = case.theirs.transformer
    expected = called(case, state, time, given.positive)
    with torch.no_grad():
        received = case.adapter.velocity(case.params, state, time, given.positive)
    assert float((received - expected.detach()).abs().max()) <= 1e-6
    _, slope = value_and_grad(along)(case.params)
    wanted = list(module.named_parameters())
    found = torch.autograd.grad((expected * direction).sum(), [x for _, x in wanted])
    for (name, _), one in zip(wanted, found, strict=True):
        assert float((slope[name] - one).abs().max()) <= 1e-4 * max(float(one.abs().max()), 1e-2), name


def called(case: Case, state: torch.Tensor, time: torch.Tensor, condition: Any) -> torch.Tensor:
    """The module of diffusers, called as its pipeline calls it."""
    given = {
        "encoder_hidden_states": condition["text"],
        "pooled_projections": condition["pooled"],
        "return_dict": False,
    }
    if case.adapter.contract.family == "sd3":
        return case.theirs.transformer(hidden_states=state, timestep=time, **given)[0]
    down, across = SIZE.height // 4, SIZE.width // 4
    ids = [case.theirs._prepare_latent_image_ids(2, down, across, torch.device("cpu"), torch.float32) for _ in range(2)]
    ids[1][:, 0] = 1
    edits = "image" in condition
    found = case.theirs.transformer(
        hidden_states=torch.cat([state, condition["image"]], 1) if edits else state, timestep=time / 1000,
        guidance=condition.get("guidance"), txt_ids=torch.zeros(condition["text"].shape[1], 3),
        img_ids=torch.cat(ids) if edits else ids[0], **given,
    )[0]  # fmt: skip
    return found[:, : state.shape[1]]


def test_a_module_that_diffusers_does_not_make_is_refused() -> None:
    with pytest.raises(ModelError, match="this version of diffusers has no NoSuchTransformer"):
        diffusers_module("NoSuchTransformer", {})
    with pytest.raises(ModelError, match="diffusers makes no SD3Transformer2DModel of this configuration"):
        diffusers_module("SD3Transformer2DModel", {"depth": 3})
    with pytest.raises(ModelError, match="is 'NoSuchPipeline', but the pipelines known here are FluxPipeline"):
        pipeline_family("NoSuchPipeline")


def test_L1_what_was_sampled_with_guidance_is_scored_again(case: Case) -> None:
    asked = FlowPrompts(conditions=conditions(case), ids=torch.tensor([4, 7]))
    process = Process(dynamics="flow_sde", guidance=case.guidance)
    levels = case.adapter.levels
    schedule = flow_match(STEPS, shift=levels.shift, lowest=levels.lowest, terminal=levels.terminal)
    laws.trajectory_matches_training(
        case.adapter, case.params, asked, Key.of(5), process, schedule, noise_levels(STEPS, None), tolerance=1e-5
    )
