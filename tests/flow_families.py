"""Tiny random pipelines of the large families, as diffusers makes them, beside their adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import diffusers
import numpy as np
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from flow_toys import tiny
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    UMT5Config,
    UMT5EncoderModel,
)

from areno_fn.contracts.flow_adapter import FlowAdapter, Pipeline, Setting, StreamGuidance
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.media import Media
from areno_fn.models.packing import packed, unpacked
from areno_fn.models.pipelines import PipelineFamily, pipeline_family

PROMPTS, AWAY = ("a red cat", "two dogs in the rain"), ("", "bad")
STRETCHED = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
FLOW = diffusers.FlowMatchEulerDiscreteScheduler


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@attrs.frozen(kw_only=True)
class Tiny:
    """A pipeline and its adapter.

    Attributes:
        theirs: the pipeline of diffusers.
        adapter: at `size`.
        guidance: of the sampler here.
        call: what the pipeline's own call takes beside prompts, sizes and latents.
        given: how its call takes the noise that a state begins with.
        media: of every request.
        tell: whether its call takes negative prompts.
        rows: prompts of a batch.
        strength: share of the steps that are made.
        taken: what its latents are as states.
    """

    theirs: Any
    family: PipelineFamily
    adapter: FlowAdapter
    guidance: float
    call: Mapping[str, Any]
    given: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda start: {"latents": start}
    taken: Callable[[Any], torch.Tensor] = lambda out: out[0]
    media: tuple[Media, ...] = ()
    tell: bool = True
    rows: int = 2
    strength: float = 1.0

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Those of the transformer, or of both experts."""
        return self.named({name: part.state_dict() for name, part in self.transformers.items()})

    @property
    def transformers(self) -> dict[str, torch.nn.Module]:
        found = {name: self.theirs.components.get(name) for name in ("transformer", "transformer_2")}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def parts(self) -> dict[str, Any]:
        """The frozen ones."""
        frozen = {name: part for name, part in self.theirs.components.items() if name not in self.transformers}
        return {name: part for name, part in frozen.items() if part is not None}

    def named(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """One tree of the leaves of all transformers."""
        if len(parts) == 1:
            return dict(*parts.values())
        return {f"{name}.{leaf}": x for name, leaves in parts.items() for leaf, x in leaves.items()}


def noise(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def filled(module: Any, first: int = 0) -> Any:
    """The module in eval mode, with numbers that depend on their place."""
    for number, value in enumerate(module.parameters()):
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(first + number))
        value.data = drawn / max(value.numel(), 4) ** 0.25
    return module.eval().requires_grad_(False)


def transformer(family: str, variant: str, first: int = 0, **changes: Any) -> Any:
    hf = {**tiny(family, variant), **changes}
    return filled(getattr(diffusers, hf["_class_name"]).from_config(hf), first)


# ----------------------------------------------------------------------------------------------- text encoders

WORDS = ["<pad>", "<end>", "<unk>", *" abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}"
    "{% for c in m.content %}{{ c.text }} {% endfor %}{% endif %}{% endfor %}"
)


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>", "padding_side": side}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **special)


def language_model(width: int, layers: int) -> Any:
    sizes = {
        "hidden_size": width,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    return filled(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(WORDS), num_hidden_layers=layers, **sizes)))


def umt5(width: int) -> Any:
    sizes = {"d_model": width, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 1, "dropout_rate": 0.0}
    return filled(UMT5EncoderModel(UMT5Config(vocab_size=len(WORDS), **sizes)))


def clip_vision(width: int) -> Any:
    sizes = {"hidden_size": width, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 2}
    return filled(CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=16, **sizes)))


class Pixels:
    """A processor of pictures that only brings them to one size."""

    def __call__(self, images: Any, return_tensors: str) -> Any:
        del return_tensors
        several = images if isinstance(images, list) else [images]
        rows = [torch.from_numpy(np.array(one)).permute(2, 0, 1).float()[None] / 255 for one in several]
        return Batch(pixel_values=torch.cat([torch.nn.functional.interpolate(row, (32, 32)) for row in rows]))


class Batch(dict[str, torch.Tensor]):
    """What a processor returns."""

    def to(self, device: Any, dtype: Any = None) -> Batch:
        del dtype
        return Batch({name: x.to(device) for name, x in self.items()})


class Sight:
    """A processor of prompts with pictures, whose sizes become letters."""

    def __call__(self, text: list[str], images: list[Any], padding: bool, return_tensors: str) -> Batch:
        del padding, return_tensors
        shown = "".join(WORDS[3:][sum(np.asarray(one).shape) % 27] for one in images)
        return Batch(tokenizer()([f"{one} {shown}" for one in text], padding=True, return_tensors="pt"))


class Looking(torch.nn.Module):
    """A language model that is also handed pictures."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = language_model(width, 1)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, input_ids: Any, attention_mask: Any, output_hidden_states: bool, **_: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=output_hidden_states)


# ---------------------------------------------------------------------------------------------- autoencoders

_BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_SIZES = {"block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 1}
_SCALES = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]}


def picture_vae(channels: int) -> Any:
    scales = {"scaling_factor": 0.36, "shift_factor": 0.11}
    return filled(diffusers.AutoencoderKL(**_BLOCKS, **_SIZES, latent_channels=channels, **scales))


def flux2_vae() -> Any:
    made = filled(diffusers.AutoencoderKLFlux2(**_BLOCKS, **_SIZES, latent_channels=1, sample_size=16))
    made.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 4))
    made.bn.running_var.copy_(torch.linspace(0.5, 2.0, 4))
    return made


def qwen_vae() -> Any:
    sizes = {"base_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    return filled(diffusers.AutoencoderKLQwenImage(**sizes, **_SCALES))


def wan_vae() -> Any:
    sizes = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return filled(diffusers.AutoencoderKLWan(**sizes, **_SCALES))


def ltx2_vaes() -> tuple[Any, Any, Any]:
    """Of pictures, of sound, and the vocoder."""
    sizes = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (16, 32, 64), "latent_channels": 4}
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    video = filled(diffusers.AutoencoderKLLTX2Video(**sizes, **layers, **ratios))
    sound = {"base_channels": 6, "ch_mult": (1, 1, 2), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 12}
    audio = filled(diffusers.AutoencoderKLLTX2Audio(**sound))
    for part, count in ((video, 4), (audio, 6)):
        part.latents_mean.copy_(torch.linspace(-0.5, 0.5, count))
        part.latents_std.copy_(torch.linspace(0.5, 2.0, count))
    up = {
        "upsample_kernel_sizes": [4, 4],
        "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1]],
    }
    return video, audio, filled(LTX2Vocoder(in_channels=24, hidden_channels=8, **up))


# ------------------------------------------------------------------------------------------------- pipelines


def described(pipeline: Any) -> Pipeline:
    """What its folder would say."""
    there = {name: part for name, part in pipeline.components.items() if part is not None}
    return Pipeline(
        class_name=type(pipeline).__name__,
        index={
            name: ("library", type(part).__name__) if part is not None else None
            for name, part in pipeline.components.items()
        },
        options={name: value for name, value in pipeline.config.items() if name not in pipeline.components},
        configs={
            name: {**part.config, "_class_name": type(part).__name__}
            for name, part in there.items()
            if isinstance(getattr(part, "config", None), dict)
        },
    )


def made(
    class_name: str,
    size: Size,
    *,
    scale: float = 0.0,
    second: float = 0.0,
    streams: StreamGuidance | None = None,
    parts: Mapping[str, Any],
    **rest: Any,
) -> Tiny:
    """The pipeline of some parts; `rest` is of `Tiny`."""
    pipeline = getattr(diffusers, class_name)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    given = described(pipeline)
    family = pipeline_family(class_name)
    adapter = family.adapter(given, Setting(size=size, guidance=scale, guidance_2=second, streams=streams))
    return Tiny(theirs=pipeline, family=family, adapter=adapter, **rest)


def picture(height: int, width: int, name: str = "picture") -> Media:
    data = (noise(name, 3, height, width).sigmoid() * 255).round() / 255
    return Media(type="image", data=data)


def as_image(one: Media) -> Image.Image:
    return Image.fromarray((one.data * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def flux2(variant: str, images: int = 0) -> Tiny:
    distilled = variant == "dev"
    parts = {"vae": flux2_vae(), "transformer": transformer("flux2", variant), "scheduler": FLOW(**STRETCHED)}
    parts |= {"text_encoder": language_model(4, 30), "tokenizer": tokenizer()}
    given = tuple(picture(64, 64, f"picture {number}") for number in range(images))
    call = {"guidance_scale": 3.0, "image": [as_image(one) for one in given] or None}
    size = Size(height=64, width=64) if images else Size(height=12, width=16)
    tokens = (size.height // 4, size.width // 4)

    def start(state: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"latents": unpacked(state, (1, *tokens), 1)[:, :, 0]}

    def taken(out: Any) -> torch.Tensor:
        if distilled:
            return out[0]
        mean, var = (x[:, None, None] for x in (parts["vae"].bn.running_mean, parts["vae"].bn.running_var))
        patches = unpacked(packed(out[0]), (1, *tokens), 1)[:, :, 0]
        return packed((patches - mean) / (var + parts["vae"].config.batch_norm_eps).sqrt(), 1)

    return made(
        "Flux2Pipeline" if distilled else "Flux2KleinPipeline", size, scale=3.0, parts=parts, call=call, media=given,
        guidance=1.0 if distilled else 3.0, given=start, taken=taken, tell=False,
    )  # fmt: skip


def qwen_image() -> Tiny:
    parts = {"vae": qwen_vae(), "transformer": transformer("qwen_image", "image"), "scheduler": FLOW(**STRETCHED)}
    parts |= {"text_encoder": language_model(12, 1), "tokenizer": tokenizer()}
    size = Size(height=12, width=16)
    return made("QwenImagePipeline", size, parts=parts, call={"true_cfg_scale": 4.0}, guidance=4.0)


@contextlib.contextmanager
def small_pictures() -> Iterator[None]:
    """The pipelines of editions bring pictures to areas of a million pixels; here to 64 x 64."""

    def dimensions(area: int, ratio: float) -> tuple[int, int, None] | tuple[int, int]:
        return (64, 64) if area != 384 * 384 else usual(area, ratio)

    usual, before = edit_plus.calculate_dimensions, edit.calculate_dimensions
    edit_plus.calculate_dimensions, edit.calculate_dimensions = dimensions, lambda *_: (64, 64, None)
    try:
        yield
    finally:
        edit_plus.calculate_dimensions, edit.calculate_dimensions = usual, before


def qwen_edit(class_name: str, images: int) -> Tiny:
    parts = {"vae": qwen_vae(), "transformer": transformer("qwen_image", "edit"), "scheduler": FLOW(**STRETCHED)}
    parts |= {"text_encoder": Looking(12), "tokenizer": tokenizer(), "processor": Sight()}
    given = (picture(64, 64),) * images
    call = {"true_cfg_scale": 2.0, "image": [as_image(one) for one in given]}
    size = Size(height=64, width=64)
    return made(class_name, size, parts=parts, call=call, guidance=2.0, media=given, rows=1)


def z_image() -> Tiny:
    parts = {"vae": picture_vae(3), "transformer": transformer("z_image", "image"), "scheduler": FLOW(shift=3.0)}
    parts |= {"text_encoder": language_model(12, 2), "tokenizer": tokenizer()}
    return made("ZImagePipeline", Size(height=12, width=16), parts=parts, call={"guidance_scale": 2.0}, guidance=3.0)


VIDEO = Size(height=32, width=48, frames=9)


def _wan_parts(variant: str, **changes: Any) -> dict[str, Any]:
    parts = {"vae": wan_vae(), "transformer": transformer("wan", variant, **changes), "scheduler": FLOW(shift=3.0)}
    return parts | {"text_encoder": umt5(10), "tokenizer": tokenizer()}


def wan(*, experts: int = 1, expand: bool = False, second: float = 0.0) -> Tiny:
    parts = _wan_parts("text to video") | {"expand_timesteps": expand}
    if experts == 2:
        parts |= {"transformer_2": transformer("wan", "text to video", 7), "boundary_ratio": 0.875}
    call = {"guidance_scale": 3.0} | ({"guidance_scale_2": second} if second else {})
    return made("WanPipeline", VIDEO, parts=parts, call=call, guidance=3.0, second=second)


def unipc() -> Any:
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return diffusers.UniPCMultistepScheduler(**flow)


def wan_unipc() -> Tiny:
    parts = _wan_parts("text to video") | {"scheduler": unipc()}
    return made("WanPipeline", VIDEO, parts=parts, call={"guidance_scale": 3.0}, guidance=3.0)


def wan_picture(variant: str, *, images: int = 1) -> Tiny:
    expand = variant == "text to video"
    changes = {} if expand else {"in_channels": 12}
    if variant.startswith("first"):
        changes["pos_embed_seq_len"] = 10  # of two pictures
    parts = _wan_parts(variant, **changes) | {"expand_timesteps": expand}
    if "image_dim" in tiny("wan", variant) and tiny("wan", variant)["image_dim"]:
        parts |= {"image_encoder": clip_vision(14), "image_processor": Pixels()}
    slots = ("first_frame", "last_frame")[:images]
    given = tuple(attrs.evolve(picture(32, 48, slot), slot=slot) for slot in slots)
    call = {"guidance_scale": 3.0, **dict(zip(("image", "last_image"), map(as_image, given), strict=False))}
    return made("WanImageToVideoPipeline", VIDEO, parts=parts, call=call, guidance=3.0, media=given, rows=1)


def wan_video(scheduler: Any = None) -> Tiny:
    parts = _wan_parts("text to video") | ({"scheduler": scheduler} if scheduler is not None else {})
    data = (noise("video", 9, 3, 32, 48).sigmoid() * 255).round() / 255
    mean, std = (torch.tensor(_SCALES[name])[:, None, None, None] for name in ("latents_mean", "latents_std"))
    clean = (parts["vae"].encode(2 * data.transpose(0, 1)[None] - 1).latent_dist.mode() - mean) / std

    def start(state: torch.Tensor) -> dict[str, torch.Tensor]:
        parts["scheduler"].set_timesteps(4)
        when, both = parts["scheduler"].timesteps[2:3].repeat(2), clean.expand(2, -1, -1, -1, -1)
        if hasattr(parts["scheduler"], "add_noise"):
            return {"latents": parts["scheduler"].add_noise(both, state, when)}
        return {"latents": parts["scheduler"].scale_noise(both, when, state)}

    given = (Media(type="video", data=data),)
    call = {"guidance_scale": 3.0, "strength": 0.5}
    return made(
        "WanVideoToVideoPipeline", VIDEO, parts=parts, call=call, guidance=3.0, media=given, given=start, strength=0.5
    )


def ltx2(variant: str, streams: StreamGuidance | None = None, *, layers: int = 2) -> Tiny:
    """Guided as the pipeline guides where nothing is said, but for the blocks whose attention is perturbed, or by `streams`."""
    video, audio, vocoder = ltx2_vaes()
    first = variant == "2"
    inner, wide = (10, {}) if first else (8, {"video_hidden_dim": 16, "audio_hidden_dim": 8})
    connectors = LTX2TextConnectors(
        caption_channels=10, text_proj_in_factor=2, rope_type="split", per_modality_projections=not first,
        video_connector_num_attention_heads=1 if first else 2, audio_connector_num_attention_heads=1,
        video_connector_attention_head_dim=inner, audio_connector_attention_head_dim=inner,
        video_connector_num_learnable_registers=None, audio_connector_num_learnable_registers=None,
        video_connector_num_layers=1, audio_connector_num_layers=1, **wide,
    )  # fmt: skip
    stretched = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    parts = {"vae": video, "audio_vae": audio, "vocoder": vocoder, "connectors": filled(connectors)}
    parts |= {
        "transformer": transformer(
            "ltx2", variant, in_channels=4, out_channels=None, perturbed_attn=not first, num_layers=layers
        ),
        "scheduler": FLOW(**STRETCHED | stretched),
    }
    for name, value in parts["transformer"].named_parameters():
        if "timestep_embedder.linear_1" in name:  # times are told to 1e-4, to which random sinusoids are no answer
            value.data /= 8
    parts |= {"text_encoder": language_model(10, 1), "tokenizer": tokenizer("left")}
    size = Size(height=64, width=96, frames=9)
    call: dict[str, Any] = {"guidance_scale": 3.0}
    if streams is not None:
        call |= {"audio_guidance_scale": streams.audio, "spatio_temporal_guidance_blocks": list(streams.blocks) or None}
        both = {"stg_scale": streams.perturbed, "modality_scale": streams.isolated, "guidance_rescale": streams.rescale}
        call |= {f"{part}{name}": value for part in ("", "audio_") for name, value in both.items()}
    tokens, length = 2 * 2 * 3, round(9 / 24 * 25)

    def start(state: torch.Tensor) -> dict[str, torch.Tensor]:
        seen, heard = state.split([tokens * 4, length * 6], 1)
        sound = heard.unflatten(1, (length, 6)) * audio.latents_std + audio.latents_mean
        return {"latents": seen.unflatten(1, (tokens, 4)), "audio_latents": sound}

    def taken(out: Any) -> torch.Tensor:
        mean, std = video.latents_mean[:, None, None, None], video.latents_std[:, None, None, None]
        heard = (out[1].transpose(1, 2).flatten(2) - audio.latents_mean) / audio.latents_std
        return torch.cat([packed((out[0] - mean) / std, 1).flatten(1), heard.flatten(1)], 1)

    return made("LTX2Pipeline", size, streams=streams, parts=parts, call=call, guidance=3.0, given=start, taken=taken)


WORDS_ALONE = StreamGuidance(audio=3.0, perturbed=0.0, isolated=1.0)

FAMILIES: dict[str, Callable[[], Tiny]] = {
    "Flux.2 dev": lambda: flux2("dev"),
    "Flux.2 dev with two pictures": lambda: flux2("dev", 2),
    "Flux.2 Klein": lambda: flux2("klein"),
    "Qwen-Image": qwen_image,
    "Qwen-Image-Edit": lambda: qwen_edit("QwenImageEditPipeline", 1),
    "Qwen-Image-Edit of two pictures": lambda: qwen_edit("QwenImageEditPlusPipeline", 2),
    "Z-Image": z_image,
    "Wan 2.1": wan_unipc,
    "Wan 2.1 with a video": wan_video,
    "Wan 2.1 with a video, by UniPC": lambda: wan_video(unipc()),
    "Wan 2.1 with a picture": lambda: wan_picture("image to video"),
    "Wan 2.1 between two pictures": lambda: wan_picture("first and last frame to video", images=2),
    "Wan 2.2 A14B": lambda: wan(experts=2),
    "Wan 2.2 A14B of two guidances": lambda: wan(experts=2, second=2.0),
    "Wan 2.2 A14B between two pictures": lambda: wan_picture("image in the channels", images=2),
    "Wan 2.2 5B": lambda: wan(expand=True),
    "Wan 2.2 5B with a picture": lambda: wan_picture("text to video"),
    "LTX-2": lambda: ltx2("2"),
    "LTX-2 by words alone": lambda: ltx2("2", WORDS_ALONE),
    "LTX-2.3": lambda: ltx2("2.3", StreamGuidance(blocks=(1,), perturbed=1.5, isolated=2.0, rescale=0.5)),
}

TRAINED = (
    "Flux.2 dev", "Qwen-Image", "Qwen-Image-Edit of two pictures", "Z-Image", "Wan 2.1", "Wan 2.2 A14B",
    "Wan 2.2 5B with a picture", "LTX-2",
)  # fmt: skip
"""One or two of every family."""
