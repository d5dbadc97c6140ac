"""Stable Diffusion 3 and 3.5 as a pipeline: two CLIP encoders, a T5 that may be absent, and pictures in 16 channels."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from areno_fn.contracts.components import Component
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Parts, Pipeline, Setting
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import Request
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.picture_adapter import LatentPictures, grid_of
from areno_fn.models.picture_codec import compression
from areno_fn.models.pipeline_words import conditions_of
from areno_fn.models.sd3 import CLASS, SD3Config, config_from_hf
from areno_fn.models.text_towers import clip_states, length_of, t5_states

TEXT = 256
"""Tokens of the T5 encoder."""

COMPONENTS = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="text_encoder"),
    Component(name="text_encoder_2"),
    Component(name="text_encoder_3", optional=True),
    Component(name="tokenizer", kind="tokenizer"),
    Component(name="tokenizer_2", kind="tokenizer"),
    Component(name="tokenizer_3", kind="tokenizer", optional=True),
    Component(name="scheduler", kind="scheduler"),
)
PREPARER = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes.

    Raises:
        ModelError: a configuration that is not supported.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    scale = compression(pipeline.configs["vae"])
    side = pipeline.configs["transformer"].get("sample_size", 128) * scale
    return PipelineIOContract(
        family="sd3",
        geometry=Geometry(
            multiple=scale * config.patch_size,
            default=Size(height=side, width=side),
            most=config.pos_embed_max_size * config.patch_size * scale,
        ),
        components=COMPONENTS,
        preparer=PREPARER,
        codec=("vae",),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class SD3Adapter(LatentPictures):
    """The `FlowAdapter` of a checkpoint at one size. States are latents [c, h, w]."""

    config: SD3Config

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, c, h, w]; the condition is {"text": [B, L, D], "pooled": [B, P]}."""
        dtype = params["proj_out.bias"].dtype
        found: torch.Tensor = self.network(
            params,
            hidden_states=state.to(dtype),
            timestep=timestep,
            encoder_hidden_states=condition["text"].to(dtype),
            pooled_projections=condition["pooled"].to(dtype),
            return_dict=False,
        )[0]
        return found

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """The states of all three encoders, one behind the other, and the two pooled vectors, side by side."""
        return conditions_of(request, lambda prompt: self._said(parts, prompt), negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for each of the encoders."""
        read = {"tokenizer": 0, "tokenizer_2": 0, "tokenizer_3": TEXT}
        return {name: length_of(parts[name], prompt, most) for name, most in read.items() if name in parts}

    def _said(self, parts: Parts, prompt: str) -> dict[str, torch.Tensor]:
        first, pooled = clip_states(parts["tokenizer"], parts["text_encoder"], prompt)
        second, pooled_2 = clip_states(parts["tokenizer_2"], parts["text_encoder_2"], prompt)
        short = torch.cat([first, second], -1)
        width = self.config.joint_attention_dim
        if "text_encoder_3" in parts:
            long = t5_states(parts["tokenizer_3"], parts["text_encoder_3"], prompt, TEXT)
        else:
            long = short.new_zeros(1, TEXT, width)
        short = torch.nn.functional.pad(short, (0, width - short.shape[-1]))
        return {"text": torch.cat([short.to(long.dtype), long], 1), "pooled": torch.cat([pooled, pooled_2], -1)}


def adapter(pipeline: Pipeline, setting: Setting) -> SD3Adapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    scale = compression(pipeline.configs["vae"])
    config = config_from_hf(pipeline.configs["transformer"])
    down, across = grid_of(setting.size, scale * config.patch_size)
    return SD3Adapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=euler_levels(pipeline.configs["scheduler"], down * across, even=False, max_shift=1.16),
        config=config,
        network=diffusers_module(CLASS, pipeline.configs["transformer"], compiled=setting.compiled),
        channels=config.in_channels,
        side=scale,
    )
