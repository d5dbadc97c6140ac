"""The large families against the pipelines and modules of diffusers, all parts tiny and random."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from flow_families import AWAY, FAMILIES, PROMPTS, TRAINED, Tiny, ltx2, noise, small_pictures
from scipy.signal import resample
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from areno_fn import Counters, Cursor, TrainState, adamw, clipped, group_advantages, pipeline, train_step, tree
from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.save import save
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process, Schedule
from areno_fn.contracts.flow_adapter import FlowAdapter, StreamGuidance
from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.media import Request
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.models import adapters
from areno_fn.models.adapter_sites import Site, chosen
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.packing import packed
from areno_fn.steps.flow.noise import latent_noise, noise_levels
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.objectives.preference import diffusion_dpo
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match, late
from areno_fn.steps.flow.score import act_flow, denoising
from areno_fn.steps.flow.times import Times
from areno_fn.steps.flow.unipc import unipc_schedule

STEPS, KEY = 4, Key.of(3)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Tiny:
    return FAMILIES[request.param]()


def conditions(case: Tiny) -> Conditions:
    said = zip(PROMPTS[: case.rows], AWAY if case.tell else ("", ""), strict=False)
    requests = [Request(prompt=one, negative_prompt=other, media=case.media) for one, other in said]
    for request in requests:
        case.adapter.contract.admit(request, "row", case.adapter.size)
    with torch.no_grad():
        each = [case.adapter.encode_conditions(case.parts, one, negative=case.guidance > 1) for one in requests]
    return tree.map(lambda *rows: torch.cat(rows), *each)


def schedule_of(case: Tiny, steps: int) -> Schedule:
    levels = case.adapter.levels
    if levels.solver == "unipc":
        return unipc_schedule(steps, shift=levels.shift)
    return flow_match(steps, shift=levels.shift_of(steps), lowest=levels.lowest, terminal=levels.terminal)


def ours_drawn(case: Tiny, params: Any, steps: int) -> torch.Tensor:
    ids = torch.tensor([4, 7])[: case.rows]
    sample = flow_sampler(
        case.adapter, Process(dynamics="ode", guidance=case.guidance, solver=case.adapter.levels.solver)
    )
    begin = None
    if case.adapter.contract.initial == "input":
        with torch.no_grad():
            begin = case.adapter.encode_output(case.parts, {"video": case.media[0].data[None]}).expand(
                2, -1, -1, -1, -1
            )
    prompts = FlowPrompts(conditions=conditions(case), ids=ids, begin=begin)
    schedule = late(schedule_of(case, steps), case.strength)
    drawn: torch.Tensor = sample(params, prompts, KEY, schedule, torch.zeros(schedule.steps)).final
    return drawn


def theirs_made(case: Tiny, steps: int, output: str) -> Any:
    """What the pipeline returns for the same noise."""
    size = case.adapter.size
    start = latent_noise(KEY.fold("start"), torch.tensor([4, 7])[: case.rows], case.adapter.latent_shape)
    call = {"height": size.height, "width": size.width, "prompt": list(PROMPTS[: case.rows]), **case.given(start)}
    call |= {"num_frames": size.frames} if size.frames > 1 and case.adapter.contract.initial == "noise" else {}
    call |= {"negative_prompt": list(AWAY[: case.rows])} if case.tell and case.guidance > 1 else {}
    with small_pictures():
        return case.theirs(**call, **case.call, num_inference_steps=steps, output_type=output, return_dict=False)


def test_sampled_latents_and_what_is_shown_are_those_of_the_pipeline(case: Tiny) -> None:
    ours, theirs = ours_drawn(case, case.params, STEPS), case.taken(theirs_made(case, STEPS, "latent"))
    assert ours.shape == theirs.shape == (case.rows, *case.adapter.latent_shape)
    assert float(theirs.std()) > 0.1
    assert float((ours - theirs).abs().max()) <= 1e-4
    with torch.no_grad():
        shown = case.adapter.decode(case.parts, theirs)
    assert list(shown) == [name for name, _ in case.adapter.components]
    for ours, theirs in zip(shown.values(), theirs_made(case, STEPS, "pt"), strict=False):
        assert ours.shape == theirs.shape
        assert float(theirs.std()) > 1e-3
        assert float((ours - theirs.float()).abs().max()) <= 1e-4


def test_what_nothing_is_said_of_guides_ltx2_as_the_pipeline_does() -> None:
    """Of 29 blocks the last is the one in which it perturbs attention; words, isolation and the deviation are its own too."""
    case = ltx2("2.3", layers=29)
    ours, theirs = ours_drawn(case, case.params, 2), case.taken(theirs_made(case, 2, "latent"))
    assert float((ours - theirs).abs().max()) <= 1e-4
    for other in (StreamGuidance(audio=3.0), StreamGuidance(perturbed=0.0), StreamGuidance(isolated=1.0)):
        changed = ltx2("2.3", other, layers=29)
        assert float((ours_drawn(changed, case.params, 2) - ours).abs().max()) > 1e-3, other


@pytest.mark.parametrize(
    ("variant", "blocks", "words"),
    [
        ("2.3", (2,), "streams.blocks: there is no block 2 of 2, which are counted from 0"),
        (
            "2",
            (1,),
            "streams.blocks: attention of this transformer cannot be perturbed, perturbed_attn is not true in its",
        ),
    ],
)
def test_blocks_whose_attention_cannot_be_perturbed_are_refused(
    variant: str, blocks: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        ltx2(variant, StreamGuidance(blocks=blocks))


def given_media(case: Tiny) -> dict[str, torch.Tensor]:
    size, frames = case.adapter.size, case.adapter.size.frames
    pictures = noise("given", 1, frames, 3, size.height, size.width).sigmoid()
    if case.family.name in ("wan", "ltx2"):
        return {"video": pictures, "audio": noise("heard", 1, 2, round(24000 * frames / 24)).tanh()}
    return {"image": pictures[:, 0]}


def encoded(case: Tiny, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The latents that a pipeline goes by, from its own functions and the configuration of its autoencoder."""
    vae, family = case.theirs.vae, case.family.name
    if family == "z_image":
        return (vae.encode(2 * given["image"] - 1).latent_dist.mode() - 0.11) * 0.36
    if family == "flux2":
        return packed(case.theirs._encode_vae_image(2 * given["image"] - 1, None), 1)
    pixels = 2 * given["image"][:, :, None] - 1 if "image" in given else 2 * given["video"].transpose(1, 2) - 1
    mode = vae.encode(pixels).latent_dist.mode()
    if family == "ltx2":
        audio = case.theirs.audio_vae
        seen = case.theirs._normalize_latents(mode, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        bank = mel_filter_bank(513, 12, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
        heard = resample(given["audio"].double().numpy(), round(16000 * 9 / 24), axis=-1)[0]
        window = window_function(1024, "hann")
        bands = [
            spectrogram(x, window, 1024, 160, power=1.0, mel_filters=bank, mel_floor=1e-5, log_mel="log").T
            for x in heard
        ]
        mel = torch.from_numpy(np.stack(bands)).float()[None, :, : 4 * 9 - 3]
        sound = case.theirs._pack_audio_latents(audio.encode(mel).latent_dist.mode())
        sound = case.theirs._normalize_audio_latents(sound, audio.latents_mean, audio.latents_std)
        return torch.cat([packed(seen, 1).flatten(1), sound.flatten(1)], 1)
    mean, std = (torch.tensor(x)[:, None, None, None] for x in (vae.config.latents_mean, vae.config.latents_std))
    return packed(((mode - mean) / std)[:, :, 0]) if family == "qwen_image" else (mode - mean) / std


def test_media_become_the_latents_that_the_pipeline_goes_by(case: Tiny) -> None:
    given = given_media(case)
    with torch.no_grad():
        ours, expected = case.adapter.encode_output(case.parts, given), encoded(case, given)
    assert ours.shape == expected.shape == (1, *case.adapter.latent_shape)
    assert float((ours - expected).abs().max()) <= 1e-4
    cut = {name: x[..., 1:] if name != "audio" else x for name, x in given.items()}
    with pytest.raises(ModelError, match=r"must be \[B, "):
        case.adapter.encode_output(case.parts, cut)


def test_gradients_are_those_of_autograd(case: Tiny) -> None:
    told, times = conditions(case), torch.full((case.rows,), 900.0)
    state = noise("state", case.rows, *case.adapter.latent_shape)

    def loss(params: Any, adapter: Any = case.adapter) -> torch.Tensor:
        found: torch.Tensor = adapter.velocity(params, state, times, told.positive)
        return found.square().sum()

    leaves = case.params
    value, pull = torch.func.vjp(loss, leaves)
    (ours,) = pull(torch.ones_like(value), retain_graph=False, create_graph=False)
    again = case.adapter.computing_again(2)
    value, pull = torch.func.vjp(lambda leaves: loss(leaves, again), leaves)
    for name, gradient in pull(torch.ones_like(value), retain_graph=False, create_graph=False)[0].items():
        # what several blocks say of the time is added up in another order, in float32
        assert float((gradient - ours[name]).abs().max()) <= 1e-3 * float(ours[name].abs().max()), name
    known = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    theirs = dict(zip(known, torch.autograd.grad(loss(known), list(known.values()), allow_unused=True), strict=True))
    moved = [name for name, x in ours.items() if bool(x.abs().sum() > 0)]
    asked = [name for name in ours if not name.startswith("transformer_2.")]
    assert set(moved) <= set(asked) and len(moved) > 0.8 * len(asked)
    for name, gradient in ours.items():
        other = theirs[name]
        assert torch.equal(gradient, torch.zeros_like(gradient) if other is None else other), name


class Viewed:
    """A policy of adapters on a model that stays as it is."""

    def __init__(self, adapter: FlowAdapter, base: Any, sites: Any) -> None:
        self.base, self.sites, self.adapter = base, sites, adapter
        self.latent_shape, self.guide = adapter.latent_shape, adapter.guide

    def view(self, params: Any) -> Any:
        return adapters.adapt(self.base, params, self.sites) if self.sites else params

    def velocity(self, params: Any, *asked: Any) -> torch.Tensor:
        return self.adapter.velocity(self.view(params), *asked)


def layouts_of(case: Tiny) -> dict[str, Iso]:
    """Of the file of every transformer."""
    known = FLOW_LAYOUTS[case.family.name]
    said = {name: {**part.config, "_class_name": type(part).__name__} for name, part in case.transformers.items()}
    return {name: known.layout(known.config_from_hf(hf)) for name, hf in said.items()}


def begun(case: Tiny, tuned: str) -> tuple[Viewed, Any]:
    """A policy, and the parameters of its actor."""
    if tuned == "full":
        return Viewed(case.adapter, None, ()), case.params
    found = [(name, site) for name, layout in layouts_of(case).items() for site in chosen(layout)]
    sites = [site if len(case.transformers) == 1 else moved(site, name) for name, site in found]
    like = adapters.shapes(sites, lambda _: 2, lambda _: 0.5)
    return Viewed(case.adapter, case.params, sites), adapters.init(like, KEY)


def moved(site: Site, part: str) -> Site:
    runs = tuple((f"{part}.{leaf}", first, count) for leaf, first, count in site.runs)
    return attrs.evolve(site, module=f"{part}.{site.module}", runs=runs)


def saved(case: Tiny, params: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """The transformers, written by us over what diffusers wrote, and read by diffusers."""
    found = {}
    for name, layout in layouts_of(case).items():
        case.transformers[name].save_pretrained(folder / "theirs" / name)
        source = open_folder(folder / "theirs" / name)
        prefix = f"{name}." if len(case.transformers) > 1 else ""
        own = {leaf: params[prefix + leaf] for leaf in layout.target}
        save(folder / "ours" / name, own, layout, source.config, source=source)
        found[name] = type(case.transformers[name]).from_pretrained(folder / "ours" / name).eval()
    return found


@pytest.mark.parametrize("tuned", ["full", "lora"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_each_kind_trains_and_diffusers_reads_what_is_saved(name: str, tuned: str, tmp_path: Path) -> None:
    case = FAMILIES[name]()
    policy, start = begun(case, tuned)
    untrained = ours_drawn(case, case.params, 2)
    optimizer = adamw(AdamWSpec(lr=1e-3), 10)
    state = TrainState(
        params={"actor": start}, optim={"actor": optimizer.init(start)}, snapshots={}, counters=Counters(), key=KEY,
        cursor=Cursor(),
    )  # fmt: skip
    told, ids = conditions(case), torch.arange(case.rows)
    clean = noise("clean", case.rows, *case.adapter.latent_shape)

    learn = train_step(pipeline(predict(policy), velocity_matching()), optimizer)
    after_sft, metrics = learn(state, noised(clean, told, ids, KEY, Times(kind="logit_normal")))
    assert metrics["train/loss"] > 0

    pairs = torch.arange(case.rows).repeat_interleave(2)
    both = tree.map(lambda x: x[pairs], told)
    shown = noise("shown", 2 * case.rows, *case.adapter.latent_shape)
    batches = noised(shown, both, torch.arange(2 * case.rows), KEY, Times(kind="logit_normal"), shared=pairs)
    batches = tuple(remember(policy, batch, reference=after_sft.params["actor"]) for batch in batches)
    prefer = train_step(pipeline(predict(policy), diffusion_dpo(100.0)), optimizer)
    after_dpo, metrics = prefer(after_sft, batches)
    assert metrics["train/loss"] == pytest.approx(math.log(2), abs=1e-6)

    sample = flow_sampler(policy, Process(dynamics="flow_sde", guidance=case.guidance))
    prompts = FlowPrompts(conditions=told, ids=ids)
    drawn = sample(after_dpo.params["actor"], prompts, KEY, flow_match(3), noise_levels(3, (0,)), samples=2)
    advantages = group_advantages(drawn.final.flatten(1).mean(1), drawn.groups)
    improve = train_step(pipeline(act_flow(policy), clipped(1e-4, 1e-4)), optimizer)
    after, metrics = improve(after_dpo, denoising(drawn, advantages))
    assert metrics["train/ratio_max"] == 1.0

    for before, now in itertools.pairwise((state, after_sft, after_dpo, after)):
        assert not tree.equal(before.params["actor"], now.params["actor"])
    assert all(bool(x.isfinite().all()) for x in tree.leaves(after.params["actor"]))
    trained = adapters.merge(policy.view(after.params["actor"]))
    read = saved(case, trained, tmp_path)
    ours = ours_drawn(case, trained, 2)
    case.theirs.register_modules(**read)
    theirs = case.taken(theirs_made(case, 2, "latent"))
    assert float((ours - theirs).abs().max()) <= 1e-4
    assert float((ours - untrained).abs().max()) > 1e-4
