"""Z-Image (base, Turbo) as a pipeline: states of a language model without padding, and pictures as latents.

The pipeline's guidance_scale g is a guidance of 1 + g here: it adds g times the difference to the velocity itself.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from areno_fn.contracts.components import Component
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Parts, Pipeline, Setting
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import Request
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.picture_adapter import LatentPictures, grid_of
from areno_fn.models.picture_codec import compression
from areno_fn.models.pipeline_words import bare_pipeline, conditions_of, filled_up, length_as_put
from areno_fn.models.z_image import CLASS, config_from_hf
from areno_fn.models.z_image.velocity import velocity

TEXT = 512
"""Tokens of the language model, at most."""

PATCH = 2
SIDE = 1024

COMPONENTS = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="text_encoder"),
    Component(name="tokenizer", kind="tokenizer"),
    Component(name="scheduler", kind="scheduler"),
)


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes.

    Raises:
        ModelError: a configuration that is not supported.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    if (PATCH, 1) not in config.patches:
        raise ModelError(f"a ZImagePipeline reads patches of {PATCH}, but its transformer has {config.patches}")
    scale = compression(pipeline.configs["vae"])
    return PipelineIOContract(
        family="z_image",
        geometry=Geometry(multiple=PATCH * scale, default=Size(height=SIDE // 8 * scale, width=SIDE // 8 * scale)),
        components=COMPONENTS,
        preparer=("text_encoder", "tokenizer"),
        codec=("vae",),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class ZImageAdapter(LatentPictures):
    """The `FlowAdapter` of a checkpoint at one size. States are latents [c, h, w]."""

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, c, h, w]; the condition is {"text": [B, L, D], "length": int64 [B]}."""

        def forward(*args: Any, **inputs: Any) -> Any:
            return self.network(params, *args, **inputs)

        return velocity(forward, state.to(params["x_pad_token"].dtype), timestep, condition, side=PATCH)

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """The states before the last layer of the language model, and how many there are."""
        words = bare_pipeline("ZImagePipeline", {name: parts[name] for name in ("text_encoder", "tokenizer")})

        def said(prompt: str) -> dict[str, torch.Tensor]:
            device = parts["text_encoder"].device
            (states,), _ = words.encode_prompt(
                [prompt], device=device, do_classifier_free_guidance=False, max_sequence_length=TEXT
            )
            return {"text": filled_up(states[None], TEXT), "length": torch.tensor([states.shape[0]], device=device)}

        return conditions_of(request, said, negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for the language model."""
        given = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT}
        return {"tokenizer": length_as_put("ZImagePipeline", parts["tokenizer"], prompt, **given)}


def adapter(pipeline: Pipeline, setting: Setting) -> ZImageAdapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    scale = compression(pipeline.configs["vae"])
    down, across = grid_of(setting.size, scale * PATCH)
    return ZImageAdapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=euler_levels(pipeline.configs["scheduler"], down * across, even=True),
        network=diffusers_module(CLASS, pipeline.configs["transformer"], compiled=setting.compiled, unread=("nheads",)),
        channels=config_from_hf(pipeline.configs["transformer"]).in_channels,
        side=scale,
    )
