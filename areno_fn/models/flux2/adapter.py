"""Flux.2 (dev, Klein) as pipelines: states of a language model, and pictures packed two by two and normalised."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.components import Component
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Made, NoiseLevels, Parts, Pipeline, Setting
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import InputMedia, InputRule, Request
from areno_fn.contracts.pipeline_io import Guidance, PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.flux2 import CLASS, Flux2Config, config_from_hf
from areno_fn.models.flux2.velocity import velocity
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.packing import packed, unpacked
from areno_fn.models.picture_adapter import PackedPictures, grid_of, require_two_by_two
from areno_fn.models.picture_codec import compression, require_pictures
from areno_fn.models.pipeline_words import bare_pipeline, conditions_of, length_as_put

SIDE = 128
"""Latents along a side of the default size."""

GUIDANCE = 4.0
PICTURES = 4
"""Most pictures to go by; the pipeline sets no bound, and attention grows with their square."""

COMPONENTS = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="text_encoder"),
    Component(name="tokenizer", kind="tokenizer"),
    Component(name="scheduler", kind="scheduler"),
)


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes. Dev is told a scale, Klein is guided, and a distilled Klein is neither.

    Raises:
        ModelError: a configuration that is not supported.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    scale = compression(pipeline.configs["vae"])
    require_two_by_two(pipeline.class_name, config.in_channels, config.out_channels, config.patch_size)
    guidance: Guidance = "none" if pipeline.options.get("is_distilled") else "classifier_free"
    if config.guidance_embeds:
        guidance = "embedded"
    return PipelineIOContract(
        family="flux2",
        inputs=InputMedia(
            rules=(InputRule(type="image", most=PICTURES),), binding="ordered_references", order="global"
        ),
        inputs_like_output=True,
        negative_prompt="optional" if guidance == "classifier_free" else "refused",
        guidance=guidance,
        guidance_default=GUIDANCE if config.guidance_embeds else 0.0,
        geometry=Geometry(multiple=2 * scale, default=Size(height=SIDE * scale, width=SIDE * scale)),
        components=COMPONENTS,
        preparer=("text_encoder", "tokenizer", "vae"),
        codec=("vae",),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class Flux2Adapter(PackedPictures):
    """The `FlowAdapter` of a checkpoint at one size. States are tokens [N, 4 c], each of two by two latents."""

    config: Flux2Config
    guidance: float
    pipeline: str

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, N, 4 c]; the condition is {"text": [B, L, D]}, with "images": ([B, 4 c, h, w], ...) to go by."""
        first = params["x_embedder.weight"]
        dtype = (first.weight if isinstance(first, Adapted) else first).dtype

        def forward(**inputs: Any) -> Any:
            return self.network(params, **inputs)

        told = self.guidance if self.config.guidance_embeds else None
        return velocity(forward, state.to(dtype), timestep, condition, grid=self.grid, guidance=told)

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """Three layers of the language model, side by side, and the latents of pictures to go by."""
        words = bare_pipeline(self.pipeline, {name: parts[name] for name in ("text_encoder", "tokenizer")})
        beside: dict[str, Any] = {}
        if request.media:
            pictures = [one.data[None] for one in request.media]
            beside["images"] = tuple(self._latents(parts, picture) for picture in pictures)

        def said(prompt: str) -> dict[str, Any]:
            return {"text": words.encode_prompt([prompt], device=parts["text_encoder"].device)[0], **beside}

        return conditions_of(request, said, negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for the language model."""
        return {"tokenizer": length_as_put(self.pipeline, parts["tokenizer"], prompt)}

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, N, 4 c] of pictures."""
        return packed(self._latents(parts, made["image"]), 1)

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """Pictures of latents."""
        vae = parts["vae"]
        tokens = latents.to(device=vae.device, dtype=vae.dtype)
        mean, std = _statistics(vae)
        found = unpacked(packed(unpacked(tokens, (1, *self.grid), 1)[:, :, 0] * std + mean, 1), (1, *self.grid))
        return {"image": (vae.decode(found[:, :, 0], return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)}

    def _latents(self, parts: Parts, pictures: torch.Tensor) -> torch.Tensor:
        """Normalised latents [B, 4 c, h, w], a patch at each place."""
        require_pictures(pictures, self.size.height, self.size.width)
        vae = parts["vae"]
        found = vae.encode((2 * pictures - 1).to(device=vae.device, dtype=vae.dtype)).latent_dist.mode()
        mean, std = _statistics(vae)
        return (unpacked(packed(found), (1, *self.grid), 1)[:, :, 0] - mean) / std


def _statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation [4 c, 1, 1] of the channels of a patch."""
    mean, var = vae.bn.running_mean[:, None, None], vae.bn.running_var[:, None, None]
    return mean, (var + vae.config.batch_norm_eps).sqrt()


def levels_of(config: Any, tokens: int) -> NoiseLevels:
    """The levels of a size: the shift is e^mu, where mu follows from the number of tokens and of steps.

    The line was fitted by the model's authors, at 10 and 200 steps; above 4,300 tokens the steps do not count.
    """
    found = euler_levels(config, tokens, even=True)
    late = 0.00016927 * tokens + 0.45666666
    slope = 0.0 if tokens > 4300 else (late - (8.73809524e-05 * tokens + 1.89833333)) / 190
    return attrs.evolve(found, shift=math.exp(late - 200 * slope), growth=math.exp(slope))


def adapter(pipeline: Pipeline, setting: Setting) -> Flux2Adapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    side = 2 * compression(pipeline.configs["vae"])
    down, across = grid_of(setting.size, side)
    return Flux2Adapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=levels_of(pipeline.configs["scheduler"], down * across),
        config=config,
        network=diffusers_module(CLASS, pipeline.configs["transformer"], compiled=setting.compiled),
        channels=config.in_channels,
        side=side,
        guidance=setting.guidance,
        pipeline=pipeline.class_name,
    )
