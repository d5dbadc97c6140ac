"""Small pipelines of diffusers with random weights, beside the same velocities made of the functions of this library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import diffusers
import numpy as np
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from flow_toys import tiny
from PIL import Image

from areno_fn.models.flux2 import velocity as flux2
from areno_fn.models.ltx2 import velocity as ltx2
from areno_fn.models.packing import packed
from areno_fn.models.qwen_image import velocity as qwen_image
from areno_fn.models.wan import velocity as wan
from areno_fn.models.z_image import velocity as z_image

STEPS, ROWS, WORDS = 4, 2, 5
STRETCHED = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
Forward = Callable[..., Any]
Params = Mapping[str, torch.Tensor]


@attrs.frozen(kw_only=True)
class Made:
    """A pipeline and its loop here.

    Attributes:
        pipeline: of diffusers.
        arguments: of its call; it returns latents.
        start: the noise that it begins with, as a state of ours.
        velocity: `(forwards, state, timestep) -> velocity`, guidance included; one forward a transformer.
        latents: what it returned, as states of ours, made of its output.
        ours: what is compared with them, made of our last state.
        same: largest difference; 0 where nothing is computed otherwise.
    """

    pipeline: Any
    arguments: Mapping[str, Any]
    start: torch.Tensor
    velocity: Callable[[tuple[Forward, ...], torch.Tensor, torch.Tensor], torch.Tensor]
    latents: Callable[[Any], torch.Tensor] = lambda out: out[0]
    ours: Callable[[torch.Tensor], torch.Tensor] = lambda state: state
    same: float = 1e-6


def noise(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def transformer(hf: Mapping[str, Any], first: int = 0) -> torch.nn.Module:
    made: torch.nn.Module = getattr(diffusers, hf["_class_name"]).from_config(dict(hf)).eval()
    for number, value in enumerate(made.parameters()):
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(first + number))
        value.data = drawn / value.numel() ** 0.25
    return made


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def masked(*lengths: int) -> torch.Tensor:
    return (torch.arange(WORDS) < torch.tensor(lengths)[:, None]).long()


# ---------------------------------------------------------------------------------------------------- decoders


def kl_decoder(channels: int = 3) -> torch.nn.Module:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 1, "latent_channels": channels}
    return diffusers.AutoencoderKL(**blocks, **sizes, scaling_factor=0.36, shift_factor=0.11)


def flux2_decoder() -> torch.nn.Module:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 1, "latent_channels": 1}
    made = diffusers.AutoencoderKLFlux2(**blocks, **sizes, sample_size=16)
    made.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 4))
    made.bn.running_var.copy_(torch.linspace(0.5, 2.0, 4))
    return made


SCALES = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]}


def qwen_decoder() -> torch.nn.Module:
    sizes = {"base_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    return diffusers.AutoencoderKLQwenImage(**sizes, **SCALES)


def wan_decoder() -> torch.nn.Module:
    sizes = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return diffusers.AutoencoderKLWan(**sizes, **SCALES)


def ltx2_decoders() -> tuple[torch.nn.Module, torch.nn.Module]:
    sizes = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (4,) * 3, "latent_channels": 3}
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    video = diffusers.AutoencoderKLLTX2Video(**sizes, **layers, **ratios)
    sound = {"base_channels": 6, "ch_mult": (1, 1, 2), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 12}
    audio = diffusers.AutoencoderKLLTX2Audio(**sound)
    for part, count in ((video, 3), (audio, 6)):
        part.latents_mean.copy_(torch.linspace(-0.5, 0.5, count))
        part.latents_std.copy_(torch.linspace(0.5, 2.0, count))
    return video, audio


# --------------------------------------------------------------------------------------------------- pipelines


def flux2_made(variant: str, images: int) -> Made:
    parts = {"vae": flux2_decoder(), "transformer": transformer(tiny("flux2", variant))}
    parts |= {
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**STRETCHED),
    }
    distilled = variant == "dev"
    pipeline = quiet((diffusers.Flux2Pipeline if distilled else diffusers.Flux2KleinPipeline)(**parts))
    text, away = noise("text", ROWS, WORDS, 12), noise("away", ROWS, WORDS, 12)
    start = noise("start", ROWS, 4, 3, 4)
    given = [picture(66, 64 + 4 * number) for number in range(images)]
    sizes = [{"height": 64, "width": 64 + 4 * number} for number in range(images)]
    shown = [
        pipeline.image_processor.preprocess(one, **size, resize_mode="crop")
        for one, size in zip(given, sizes, strict=True)
    ]
    latents = tuple(pipeline._encode_vae_image(one, None).detach().expand(ROWS, -1, -1, -1) for one in shown)
    call = {"image": given or None, "prompt_embeds": text, "height": 12, "width": 16, "latents": start}
    call |= {"guidance_scale": 3.0, **({} if distilled else {"negative_prompt_embeds": away})}

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        def ask(words: torch.Tensor, guidance: float | None) -> torch.Tensor:
            condition = {"text": words, "images": latents}
            return flux2.velocity(*forwards, state, timestep, condition, grid=(3, 4), guidance=guidance)

        return ask(text, 3.0) if distilled else ask(away, None) + 3.0 * (ask(text, None) - ask(away, None))

    def theirs(out: Any) -> torch.Tensor:
        if distilled:
            return out[0]
        mean, var = pipeline.vae.bn.running_mean, pipeline.vae.bn.running_var
        patches = pipeline._patchify_latents(out[0])
        std = (var + pipeline.vae.config.batch_norm_eps).sqrt()
        return packed((patches - mean[:, None, None]) / std[:, None, None], 1)

    return Made(pipeline=pipeline, arguments=call, start=packed(start, 1), velocity=velocity, latents=theirs, same=1e-5)


def qwen_made() -> Made:
    parts = {"vae": qwen_decoder(), "transformer": transformer(tiny("qwen_image", "image"))}
    parts |= {
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**STRETCHED),
    }
    positive = {"text": noise("text", ROWS, WORDS, 12), "mask": masked(5, 3)}
    negative = {"text": noise("away", ROWS, WORDS, 12), "mask": masked(4, 5)}
    start = packed(noise("start", ROWS, 4, 6, 8))
    call = {"prompt_embeds": positive["text"], "prompt_embeds_mask": positive["mask"], "true_cfg_scale": 4.0}
    call |= {"negative_prompt_embeds": negative["text"], "negative_prompt_embeds_mask": negative["mask"]}

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        both = [qwen_image.velocity(*forwards, state, timestep, one, grid=(3, 4)) for one in (positive, negative)]
        return qwen_image.guide(*both, 4.0, state, timestep)

    size = {"height": 12, "width": 16, "latents": start}
    return Made(
        pipeline=quiet(diffusers.QwenImagePipeline(**parts)), arguments=call | size, start=start, velocity=velocity
    )


@contextlib.contextmanager
def small_pictures() -> Iterator[None]:
    """The pipeline of editions brings pictures to an area that it has as a constant of its module."""
    before = edit_plus.CONDITION_IMAGE_SIZE, edit_plus.VAE_IMAGE_SIZE
    edit_plus.CONDITION_IMAGE_SIZE = edit_plus.VAE_IMAGE_SIZE = 64 * 64
    try:
        yield
    finally:
        edit_plus.CONDITION_IMAGE_SIZE, edit_plus.VAE_IMAGE_SIZE = before


def edit_made(images: int) -> Made:
    parts = {"vae": qwen_decoder(), "transformer": transformer(tiny("qwen_image", "edit")), "processor": None}
    parts |= {
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**STRETCHED),
    }
    pipeline = quiet(diffusers.QwenImageEditPlusPipeline(**parts))
    given = [picture(64, 64)] * images
    width, height = 64, 64
    shown = pipeline.image_processor.preprocess(given[0], height, width).unsqueeze(2)
    latents = (pipeline._encode_vae_image(shown, None)[:, :, 0].detach(),) * images
    condition = {"text": noise("text", 1, WORDS, 12), "mask": masked(3), "images": latents}
    start = packed(noise("start", 1, 4, 6, 8))
    call = {"image": given, "prompt_embeds": condition["text"], "prompt_embeds_mask": condition["mask"]}
    call |= {"true_cfg_scale": 1.0, "height": 12, "width": 16, "latents": start}

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return qwen_image.velocity(*forwards, state, timestep, condition, grid=(3, 4))

    return Made(pipeline=pipeline, arguments=call, start=start, velocity=velocity)


def z_made() -> Made:
    parts = {"vae": kl_decoder(), "transformer": transformer(tiny("z_image", "image"))}
    parts |= {
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**STRETCHED),
    }
    positive = {"text": noise("text", ROWS, WORDS, 12), "length": torch.tensor([5, 3])}
    negative = {"text": noise("away", ROWS, WORDS, 12), "length": torch.tensor([2, 5])}
    start = noise("start", ROWS, 3, 6, 8)

    def words(given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [text[:count] for text, count in zip(given["text"], given["length"], strict=True)]

    call = {"prompt_embeds": words(positive), "negative_prompt_embeds": words(negative), "guidance_scale": 3.0}

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        towards, away = (z_image.velocity(*forwards, state, timestep, one) for one in (positive, negative))
        return away + 4.0 * (towards - away)

    size = {"height": 12, "width": 16, "latents": start}
    pipeline = quiet(diffusers.ZImagePipeline(**parts))
    return Made(pipeline=pipeline, arguments=call | size, start=start, velocity=velocity, same=1e-5)


def wan_made(*, expand: bool, experts: int) -> Made:
    hf = tiny("wan", "text to video")
    parts = {"vae": wan_decoder(), "transformer": transformer(hf)}
    parts |= {
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    if experts == 2:
        parts |= {"transformer_2": transformer({**hf, "num_layers": 1}, 7), "boundary_ratio": 0.875}
    positive, negative = {"text": noise("text", ROWS, WORDS, 10)}, {"text": noise("away", ROWS, WORDS, 10)}
    start = noise("start", ROWS, 4, 3, 4, 6)
    call = {"prompt_embeds": positive["text"], "negative_prompt_embeds": negative["text"], "guidance_scale": 3.0}

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        def ask(forward: Forward) -> Callable[..., torch.Tensor]:
            return lambda *given: wan.velocity(forward, *given, patch=(1, 2, 2), times_of_patches=expand)

        def one(condition: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if experts == 1:
                return ask(forwards[0])(state, timestep, condition)
            return wan.by_level(ask(forwards[0]), ask(forwards[1]), state, timestep, condition, 0.875)

        return one(negative) + 3.0 * (one(positive) - one(negative))

    size = {"height": 32, "width": 48, "num_frames": 9, "latents": start}
    pipeline = quiet(diffusers.WanPipeline(**parts, expand_timesteps=expand))
    return Made(pipeline=pipeline, arguments=call | size, start=start, velocity=velocity)


def wan_image_made(*, expand: bool, last: bool = False, features: bool = False) -> Made:
    hf = tiny("wan", "text to video") if expand else {**tiny("wan", "image in the channels"), "in_channels": 12}
    hf = {**tiny("wan", "image to video"), "in_channels": 12} if features else hf
    parts = {"vae": wan_decoder(), "transformer": transformer(hf), "expand_timesteps": expand}
    parts |= {
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    pipeline = quiet(diffusers.WanImageToVideoPipeline(**parts))
    start, text = noise("start", ROWS, 4, 3, 4, 6), noise("text", ROWS, WORDS, 10)
    given = {"image": picture(32, 48), **({"last_image": picture(32, 48)} if last else {})}
    shown = {name: pipeline.video_processor.preprocess(one, height=32, width=48) for name, one in given.items()}
    size = {"height": 32, "width": 48, "num_frames": 9, "dtype": torch.float32, "device": "cpu", "latents": start}
    laid = pipeline.prepare_latents(**shown, batch_size=ROWS, num_channels_latents=4, **size)[1].detach()
    condition = {"text": text, ("first" if expand else "channels"): laid}
    call = {**given, "prompt_embeds": text, "guidance_scale": 1.0, "height": 32, "width": 48, "num_frames": 9}
    if features:
        seen = noise("seen", 1, 4, 14)
        pipeline.encode_image = lambda image, device: seen
        condition["features"] = seen.repeat(ROWS, 1, 1)

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return wan.velocity(*forwards, state, timestep, condition, patch=(1, 2, 2), times_of_patches=expand)

    def ours(state: torch.Tensor) -> torch.Tensor:
        return torch.cat([laid, state[:, :, 1:]], 2) if expand else state

    arguments = call | {"latents": start}
    return Made(pipeline=pipeline, arguments=arguments, start=start, velocity=velocity, ours=ours)


def ltx2_made(variant: str, rescale: float) -> Made:
    video, audio = ltx2_decoders()
    hf = {**tiny("ltx2", variant), "out_channels": None}
    inner, wide = (10, {}) if variant == "2" else (8, {"video_hidden_dim": 16, "audio_hidden_dim": 8})
    heads = {
        "video_connector_num_attention_heads": 1 if variant == "2" else 2,
        "audio_connector_num_attention_heads": 1,
    }
    widths = {f"{part}_connector_attention_head_dim": inner for part in ("video", "audio")}
    bare = {f"{part}_connector_num_learnable_registers": None for part in ("video", "audio")}
    layers = {f"{part}_connector_num_layers": 1 for part in ("video", "audio")}
    connectors = LTX2TextConnectors(
        caption_channels=10, text_proj_in_factor=2, rope_type="split", per_modality_projections=variant != "2",
        **heads, **widths, **bare, **layers, **wide,
    ).eval()  # fmt: skip
    stretched = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**STRETCHED | stretched)
    parts = {"vae": video, "audio_vae": audio, "connectors": connectors, "transformer": transformer(hf)}
    parts |= {"text_encoder": None, "tokenizer": None, "vocoder": None, "scheduler": scheduler}
    pipeline = quiet(diffusers.LTX2Pipeline(**parts))
    streams = ltx2.Streams(grid=(2, 2, 3), channels=3, length=round(9 / 24 * 25), audio_channels=6)
    start = noise("start", ROWS, streams.numel)
    first, sound = streams.split(start)
    texts = {"prompt": (noise("text", ROWS, WORDS, 20), masked(5, 3).flip(1))}
    texts["negative_prompt"] = (noise("away", ROWS, WORDS, 20), masked(4, 5).flip(1))
    with torch.no_grad():
        told = {name: connectors(*given, padding_side="left") for name, given in texts.items()}
    call = {f"{name}_embeds": text for name, (text, _) in texts.items()}
    call |= {f"{name}_attention_mask": mask for name, (_, mask) in texts.items()}
    call |= {"height": 64, "width": 96, "num_frames": 9, "latents": first}
    call["audio_latents"] = audio.latents_mean + sound * audio.latents_std
    for part in ("", "audio_"):
        call |= {f"{part}guidance_scale": 3.0, f"{part}stg_scale": 0.0, f"{part}modality_scale": 1.0}
        call[f"{part}guidance_rescale"] = rescale

    def velocity(forwards: tuple[Forward, ...], state: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        answers = []
        for text, spoken, mask in told.values():
            condition = {"text": text, "audio_text": spoken, "mask": mask}
            answers.append(ltx2.velocity(*forwards, state, timestep, condition, streams=streams, rate=24.0))
        return ltx2.guide(*answers, 3.0, state, timestep, streams=streams, rescale=rescale)

    def theirs(out: Any) -> torch.Tensor:
        frames = pipeline._normalize_latents(out[0], video.latents_mean, video.latents_std, 1.0)
        heard = pipeline._pack_audio_latents(out[1])
        return streams.join(packed(frames, 1), (heard - audio.latents_mean) / audio.latents_std)

    return Made(pipeline=pipeline, arguments=call, start=start, velocity=velocity, latents=theirs, same=1e-5)


PIPELINES: dict[str, Callable[[], Made]] = {
    "Flux.2 dev": lambda: flux2_made("dev", 0),
    "Flux.2 dev with two pictures": lambda: flux2_made("dev", 2),
    "Flux.2 Klein": lambda: flux2_made("klein", 1),
    "Qwen-Image": qwen_made,
    "Qwen-Image-Edit with two pictures": lambda: edit_made(2),
    "Z-Image": z_made,
    "Wan 2.1": lambda: wan_made(expand=False, experts=1),
    "Wan 2.2 with two experts": lambda: wan_made(expand=False, experts=2),
    "Wan 2.2 5B": lambda: wan_made(expand=True, experts=1),
    "Wan 2.1 with a picture": lambda: wan_image_made(expand=False, features=True),
    "Wan 2.2 with two pictures": lambda: wan_image_made(expand=False, last=True),
    "Wan 2.2 5B with a picture": lambda: wan_image_made(expand=True),
    "LTX-2": lambda: ltx2_made("2", 0.7),
    "LTX-2.3": lambda: ltx2_made("2.3", 0.0),
}
