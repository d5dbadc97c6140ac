"""Qwen-Image and its editions as pipelines: states of a vision language model, and pictures packed two by two.

An edition sees the pictures that it changes twice: its language model a small copy, its transformer their latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.components import Component
from areno_fn.contracts.errors import DataError, ModelError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Made, Parts, Pipeline, Setting
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import InputMedia, InputRule, Request
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.packing import packed, unpacked
from areno_fn.models.picture_adapter import PackedPictures, grid_of
from areno_fn.models.picture_codec import require_pictures
from areno_fn.models.pipeline_words import bare_pipeline, conditions_of, filled_up, length_as_put
from areno_fn.models.qwen_image import CLASS, QwenImageConfig, config_from_hf
from areno_fn.models.qwen_image.velocity import guide, velocity
from areno_fn.models.video_codec import decoded, encoded

SIDE = 1024


@attrs.frozen(kw_only=True)
class Edition:
    """How one of the pipelines asks its language model.

    Attributes:
        most: pictures that are changed; 0: it makes new ones.
        text: states of a prompt with its pictures; shorter ones are filled up with what is not read.
        seen: pixels of the copy of a picture that the language model sees; 0: it sees the picture itself.
    """

    most: int
    text: int
    seen: int


EDITIONS = {
    "QwenImagePipeline": Edition(most=0, text=512, seen=0),
    "QwenImageEditPipeline": Edition(most=1, text=2048, seen=0),
    "QwenImageEditPlusPipeline": Edition(most=3, text=1024, seen=384 * 384),
}

CUTTING = ("QwenImagePipeline",)
"""Those that cut a prompt which is too long, where the others are refused."""

COMPONENTS = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="text_encoder"),
    Component(name="tokenizer", kind="tokenizer"),
    Component(name="scheduler", kind="scheduler"),
)


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes: an edition takes pictures, which have the size of the one that it makes.

    Raises:
        ModelError: a configuration that is not supported.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    packing = config.patch_size**2
    if config.in_channels != config.out_channels * packing or config.use_additional_t_cond:
        raise ModelError(
            f"{pipeline.class_name} makes pictures of one layer, {config.out_channels} channels {packing} to a token, "
            f"but its transformer takes {config.in_channels}, or a layer's condition"
        )
    if pipeline.configs["transformer"].get("guidance_embeds"):
        raise ModelError("guidance_embeds is true, but the transformer of diffusers has no embedding of a scale")
    scale, most = compression(pipeline.configs["vae"]), EDITIONS[pipeline.class_name].most
    rules = (InputRule(type="image", least=1, most=most),) if most else ()
    several = {"binding": "ordered_references", "order": "global"} if most > 1 else {}
    side = SIDE // 8 * scale
    return PipelineIOContract(
        family="qwen_image",
        inputs=InputMedia(rules=rules, **several),  # type: ignore[arg-type]  # the literals of a table
        inputs_like_output=bool(most),
        geometry=Geometry(multiple=config.patch_size * scale, default=Size(height=side, width=side)),
        components=(*COMPONENTS, Component(name="processor", kind="processor")) if most else COMPONENTS,
        preparer=("text_encoder", "tokenizer", "processor", "vae") if most else ("text_encoder", "tokenizer"),
        codec=("vae",),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class QwenImageAdapter(PackedPictures):
    """The `FlowAdapter` of a checkpoint at one size. States are tokens [N, 4 c], each of two by two latents."""

    config: QwenImageConfig
    pipeline: str
    guide = staticmethod(guide)

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, N, 4 c].

        The condition is {"text": [B, L, D], "words": [B, L]}, with "images": ([B, c, h, w], ...) that are changed.
        """

        def forward(**inputs: Any) -> Any:
            return self.network(params, **inputs)

        state = state.to(params["img_in.bias"].dtype)
        return velocity(forward, state, timestep, condition, grid=self.grid, side=self.config.patch_size)

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """The last states of the language model, which of them are words, and the latents of pictures that are changed."""
        names = [name for name in self.contract.preparer if name != "vae"]
        words = bare_pipeline(self.pipeline, {name: parts[name] for name in names})
        edition, given = EDITIONS[self.pipeline], dict[str, Any]()
        beside: dict[str, Any] = {}
        if request.media:
            given["image"] = [_seen(one.data, edition.seen) for one in request.media]
            beside["images"] = tuple(self._latents(parts, one.data[None]) for one in request.media)

        def said(prompt: str) -> dict[str, Any]:
            states, mask = words.encode_prompt(
                prompt=[prompt], device=parts["text_encoder"].device, max_sequence_length=edition.text, **given
            )
            if states.shape[1] > edition.text:
                raise DataError(
                    f"a prompt with its pictures is {states.shape[1]} tokens, but {self.pipeline} takes {edition.text}"
                )
            marks = torch.ones_like(states[..., 0], dtype=torch.int64) if mask is None else mask
            return {"text": filled_up(states, edition.text), "words": filled_up(marks, edition.text), **beside}

        return conditions_of(request, said, negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for the language model; an edition refuses what is too long."""
        if self.pipeline not in CUTTING:
            return {}
        length, _ = length_as_put(self.pipeline, parts["tokenizer"], prompt)
        words = bare_pipeline(self.pipeline, {"tokenizer": parts["tokenizer"]})
        return {"tokenizer": (length, words.prompt_template_encode_start_idx + EDITIONS[self.pipeline].text)}

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, N, 4 c] of pictures."""
        return packed(self._latents(parts, made["image"]), self.config.patch_size)

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """Pictures of latents."""
        return {"image": decoded(parts["vae"], unpacked(latents, (1, *self.grid), self.config.patch_size))[:, 0]}

    def _latents(self, parts: Parts, pictures: torch.Tensor) -> torch.Tensor:
        require_pictures(pictures, self.size.height, self.size.width)
        return encoded(parts["vae"], pictures[:, None])[:, :, 0]


def compression(config: Mapping[str, Any]) -> int:
    """How many pixels along a side become one latent."""
    stages: Sequence[bool] = config.get("temperal_downsample", (False, True, True))
    return int(2 ** len(stages))


def _seen(picture: torch.Tensor, pixels: int) -> np.ndarray[Any, Any]:
    """What the language model sees of a picture [3, H, W]: uint8 [h, w, 3] of about so many pixels, by 32s; 0: as it is."""
    if pixels:
        ratio = picture.shape[2] / picture.shape[1]
        width = (pixels * ratio) ** 0.5
        size = [round(width / ratio / 32) * 32, round(width / 32) * 32]
        small = torch.nn.functional.interpolate(picture[None], size=size, mode="bicubic", antialias=True)
        picture = small[0].clamp(0, 1)
    found: np.ndarray[Any, Any] = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return found


def adapter(pipeline: Pipeline, setting: Setting) -> QwenImageAdapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    side = compression(pipeline.configs["vae"]) * config.patch_size
    down, across = grid_of(setting.size, side)
    return QwenImageAdapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=euler_levels(pipeline.configs["scheduler"], down * across, even=True),
        config=config,
        network=diffusers_module(
            CLASS, pipeline.configs["transformer"], compiled=setting.compiled, unread=("pooled_projection_dim",)
        ),
        channels=config.in_channels,
        side=side,
        pipeline=pipeline.class_name,
    )
