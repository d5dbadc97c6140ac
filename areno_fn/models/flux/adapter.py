"""Flux.1 (dev, schnell) and Kontext as pipelines: CLIP's pooled vector, T5's states, and pictures packed two by two."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from areno_fn.contracts.components import Component
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Made, Parts, Pipeline, Setting
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import InputMedia, InputRule, Request
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.flux import CLASS, FluxConfig, config_from_hf
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.packing import packed, unpacked
from areno_fn.models.picture_adapter import PackedPictures, grid_of, require_two_by_two
from areno_fn.models.picture_codec import compression, decoded, encoded, require_pictures
from areno_fn.models.pipeline_words import conditions_of
from areno_fn.models.text_towers import clip_pooled, length_of, t5_states

TEXT = 512
"""Tokens of the T5 encoder."""

SIDE = 128
"""Latents along a side of the default size."""

GUIDANCE = 3.5
EDITING = "FluxKontextPipeline"

COMPONENTS = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="text_encoder"),
    Component(name="text_encoder_2"),
    Component(name="tokenizer", kind="tokenizer"),
    Component(name="tokenizer_2", kind="tokenizer"),
    Component(name="scheduler", kind="scheduler"),
)
WORDS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes: Kontext takes one picture, which has the size of the one that it makes.

    Raises:
        ModelError: a configuration that is not supported.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    scale, edits = compression(pipeline.configs["vae"]), pipeline.class_name == EDITING
    require_two_by_two(pipeline.class_name, config.in_channels, config.out_channels, config.patch_size)
    return PipelineIOContract(
        family="flux",
        inputs=InputMedia(rules=(InputRule(type="image", least=1),) if edits else ()),
        inputs_like_output=edits,
        guidance="both" if config.guidance_embeds else "classifier_free",
        guidance_default=GUIDANCE if config.guidance_embeds else 0.0,
        geometry=Geometry(multiple=2 * scale, default=Size(height=SIDE * scale, width=SIDE * scale)),
        components=COMPONENTS,
        preparer=(*WORDS, "vae") if edits else WORDS,
        codec=("vae",),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class FluxAdapter(PackedPictures):
    """The `FlowAdapter` of a checkpoint at one size. States are tokens [N, 4 c], each of two by two latents."""

    config: FluxConfig
    guidance: float

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, N, 4 c].

        The condition is {"text": [B, L, D], "pooled": [B, P]}, with "guidance": [B] where the scale is embedded, and
        "image": [B, N, 4 c] where a picture is edited.
        """
        dtype, tokens = params["proj_out.bias"].dtype, state.to(params["proj_out.bias"].dtype)
        places = positions(self.grid, 0, state.device)
        if "image" in condition:
            tokens = torch.cat([tokens, condition["image"].to(dtype)], 1)
            places = torch.cat([places, positions(self.grid, 1, state.device)])
        found: torch.Tensor = self.network(
            params,
            hidden_states=tokens,
            timestep=(timestep / 1000).to(dtype),
            guidance=condition.get("guidance"),
            pooled_projections=condition["pooled"].to(dtype),
            encoder_hidden_states=condition["text"].to(dtype),
            txt_ids=places.new_zeros(condition["text"].shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return found[:, : state.shape[1]]

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """What both encoders say, the embedded scale, and the latents of a picture that is to be edited."""
        beside: dict[str, torch.Tensor] = {}
        if request.media:
            beside["image"] = self.encode_output(parts, {"image": request.media[0].data[None]})
        if self.config.guidance_embeds:
            beside["guidance"] = torch.tensor([self.guidance], device=parts["text_encoder"].device)
        return conditions_of(request, lambda prompt: self._said(parts, prompt) | beside, negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for either encoder."""
        read = {"tokenizer": 0, "tokenizer_2": TEXT}
        return {name: length_of(parts[name], prompt, most) for name, most in read.items()}

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, N, 4 c] of pictures."""
        require_pictures(made["image"], self.size.height, self.size.width)
        return packed(encoded(parts["vae"], made["image"]))

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """Pictures of latents."""
        return {"image": decoded(parts["vae"], unpacked(latents, (1, *self.grid))[:, :, 0])}

    def _said(self, parts: Parts, prompt: str) -> dict[str, torch.Tensor]:
        return {
            "text": t5_states(parts["tokenizer_2"], parts["text_encoder_2"], prompt, TEXT),
            "pooled": clip_pooled(parts["tokenizer"], parts["text_encoder"], prompt),
        }


def positions(grid: tuple[int, int], picture: int, device: torch.device) -> torch.Tensor:
    """Which picture, row and column a token is of, float32 [N, 3]."""
    down, across = (torch.arange(count, dtype=torch.float32, device=device) for count in grid)
    rows, columns = torch.meshgrid(down, across, indexing="ij")
    return torch.stack([torch.full_like(rows, picture), rows, columns], -1).flatten(0, 1)


def adapter(pipeline: Pipeline, setting: Setting) -> FluxAdapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    side = 2 * compression(pipeline.configs["vae"])
    down, across = grid_of(setting.size, side)
    return FluxAdapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=euler_levels(pipeline.configs["scheduler"], down * across, even=True),
        config=config,
        network=diffusers_module(CLASS, pipeline.configs["transformer"], compiled=setting.compiled),
        channels=config.in_channels,
        side=side,
        guidance=setting.guidance,
    )
