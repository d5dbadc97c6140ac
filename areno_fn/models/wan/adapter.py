"""Wan 2.1 and 2.2 as pipelines: text and video to video, and pictures to video in each of three ways.

A picture is shown in channels beside those of the state (2.1, 2.2 A14B), with its features (2.1), or as the clean first
frame of the state (2.2 5B), which is then not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from areno_fn.contracts.components import Component
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Made, NoiseLevels, Parts, Pipeline, Setting
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import InputMedia, InputRule, MediaType, Request
from areno_fn.contracts.pipeline_io import Output, PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.module_function import ModuleFunction
from areno_fn.models.noise_levels import euler_levels, unipc_levels
from areno_fn.models.picture_codec import require_pictures
from areno_fn.models.pipeline_words import bare_pipeline, conditions_of, length_as_put
from areno_fn.models.video_codec import decoded, encoded, encoded_pixels, require_videos, scaled
from areno_fn.models.wan import CLASS, WanConfig, config_from_hf
from areno_fn.models.wan.velocity import by_level, velocity

TEXT = 512
"""States of a prompt."""

RATE = 16
"""Frames a second; 24 where the first frame is a clean one."""

WITH_PICTURE = "WanImageToVideoPipeline"
WITH_VIDEO = "WanVideoToVideoPipeline"
"""It begins with a given video, noised to a level of the schedule; nothing else of it is shown."""

STRENGTH = 0.8
"""Share of the steps that it makes then, where nothing is said."""

EXPERTS = ("transformer", "transformer_2")
"""That of the noisy levels, and that of the others; the parameters of two have these names before their own."""


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes.

    Raises:
        ModelError: a configuration that is not supported.
    """
    config = config_from_hf(pipeline.configs["transformer"])
    shown, anew = pipeline.class_name == WITH_PICTURE, pipeline.class_name == WITH_VIDEO
    space, time = compression(pipeline.configs["vae"])
    extra = config.in_channels - config.out_channels
    expected = time + config.out_channels if shown and not _first(pipeline) else 0
    if extra != expected or config.patch_size[1] != config.patch_size[2] or config.patch_size[0] != 1:
        raise ModelError(
            f"a {pipeline.class_name} lays {expected} channels beside those of its videos and cuts frames into squares, but "
            f"its transformer takes {extra}, in patches of {config.patch_size}"
        )
    multiple = space * config.patch_size[1]
    usual = Size(height=480 // multiple * multiple, width=832 // multiple * multiple, frames=20 * time + 1)
    return PipelineIOContract(
        family="wan",
        inputs=_inputs(pipeline, config),
        inputs_like_output=shown or anew,
        initial="input" if anew else "noise",
        outputs=(Output(type="video", rate=24 if _first(pipeline) else RATE),),
        geometry=Geometry(multiple=multiple, frames_multiple=time, default=usual),
        components=_components(pipeline, config),
        preparer=("text_encoder", "tokenizer", *(("vae",) if shown else ()), *(_seers(config) if shown else ())),
        codec=("vae",),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class WanAdapter:
    """The `FlowAdapter` of a checkpoint at one size. States are latents [c, F, h, w].

    Attributes:
        networks: one transformer, or the two experts.
        boundary: the noise level from which the first of two is asked.
        first: a picture is the first frame, and every patch is told its own time.
        guidance_2: weight of guidance below the boundary, where there is guidance; 0: as above it.
    """

    contract: PipelineIOContract
    size: Size
    levels: NoiseLevels
    config: WanConfig
    networks: tuple[ModuleFunction, ...]
    boundary: float
    compression: tuple[int, int]
    first: bool
    pipeline: str
    guidance_2: float = 0.0

    def computing_again(self, every: int) -> WanAdapter:
        """The same adapter, every so many-th of whose blocks keeps its input alone; 0 for none."""
        return attrs.evolve(self, networks=tuple(network.computing_again(every) for network in self.networks))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """c, F, h, w."""
        space, time = self.compression
        frames = (self.size.frames - 1) // time + 1
        return (self.config.out_channels, frames, self.size.height // space, self.size.width // space)

    @property
    def components(self) -> tuple[tuple[MediaType, tuple[int, ...]], ...]:
        """A video alone."""
        return (("video", self.latent_shape),)

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, c, F, h, w].

        The condition is {"text": [B, L, D]}, with "channels" [B, e, F, h, w] or "first" [B, c, 1, h, w] of pictures, and
        perhaps "features" [B, P, E]. Parameters of two experts are called as in `EXPERTS` before their own names.
        """
        if len(self.networks) == 1:
            return self._asked(self.networks[0], params, state, timestep, condition)
        parts = [_own(params, f"{name}.") for name in EXPERTS]
        high, low = (self._expert(*one) for one in zip(self.networks, parts, strict=True))
        return by_level(high, low, state, timestep, condition, self.boundary)

    def guide(
        self, towards: torch.Tensor, away: torch.Tensor, scale: float, state: torch.Tensor, timestep: torch.Tensor
    ) -> torch.Tensor:
        """The velocity [B, c, F, h, w] of guidance, which has a weight of its own below the boundary."""
        found = straight(towards, away, scale, state, timestep)
        if not self.guidance_2:
            return found
        noisy = (timestep >= self.boundary * 1000)[:, None, None, None, None]
        return torch.where(noisy, found, straight(towards, away, self.guidance_2, state, timestep))

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """The states of the text encoder, and what is shown of pictures."""
        words = bare_pipeline(self.pipeline, {name: parts[name] for name in ("text_encoder", "tokenizer")})
        beside = self._shown(parts, request) if self.pipeline == WITH_PICTURE else {}

        def said(prompt: str) -> dict[str, torch.Tensor]:
            device = parts["text_encoder"].device
            given = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT, "device": device}
            return {"text": words.encode_prompt([prompt], **given)[0], **beside}

        return conditions_of(request, said, negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for the text encoder."""
        given = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT}
        return {"tokenizer": length_as_put(self.pipeline, parts["tokenizer"], prompt, **given)}

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, c, F, h, w] of videos."""
        require_videos(made["video"], self.size.frames, self.size.height, self.size.width)
        return encoded(parts["vae"], made["video"])

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """Videos of latents."""
        return {"video": decoded(parts["vae"], latents)}

    def _expert(self, network: ModuleFunction, params: Mapping[str, Any]) -> Any:
        return lambda *asked: self._asked(network, params, *asked)

    def _asked(
        self, network: ModuleFunction, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any
    ) -> torch.Tensor:
        def forward(**inputs: Any) -> Any:
            return network(params, **inputs)

        return velocity(
            forward,
            state,
            timestep,
            condition,
            patch=self.config.patch_size,
            dtype=params["patch_embedding.bias"].dtype,
            times_of_patches=self.first,
            pairs=bool(self.config.image_positions),
        )

    def _shown(self, parts: Parts, request: Request) -> dict[str, torch.Tensor]:
        """What the transformer is shown of the pictures of a request, first dimensions 1."""
        named = {one.slot or "first_frame": one.data for one in request.media}
        for picture in named.values():
            require_pictures(picture[None], self.size.height, self.size.width)
        start = named["first_frame"][:, None]
        if self.first:
            return {"first": scaled(parts["vae"], encoded_pixels(parts["vae"], (2 * start - 1)[None]))}
        ends = [named["last_frame"][:, None]] if "last_frame" in named else []
        empty = start.new_full((3, self.size.frames - 1 - len(ends), *start.shape[2:]), 0.5)
        laid = torch.cat([start, empty, *ends], 1)[None]
        latents = scaled(parts["vae"], encoded_pixels(parts["vae"], 2 * laid - 1))
        found = {"channels": torch.cat([self._marks(bool(ends)).to(latents), latents], 1)}
        if "image_encoder" in parts:
            found["features"] = _features(parts, list(named.values()))
        return found

    def _marks(self, last: bool) -> torch.Tensor:
        """Which frames are shown, [1, time, F, h, w]: the frames of a latent are its channels, the first one's all alike."""
        _, frames, height, width = self.latent_shape
        time = self.compression[1]
        marks = torch.zeros(1, frames, time, height, width)
        marks[:, 0] = 1
        if last:
            marks[:, -1, -1] = 1
        return marks.transpose(1, 2)


def compression(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many pixels along a side, and how many frames, become one latent."""
    return int(config.get("scale_factor_spatial", 8)), int(config.get("scale_factor_temporal", 4))


def _inputs(pipeline: Pipeline, config: WanConfig) -> InputMedia:
    """The frames that are given: features have positions for two or for one, channels have room for both, a state for one."""
    if pipeline.class_name == WITH_VIDEO:
        return InputMedia(rules=(InputRule(type="video", least=1),))
    if pipeline.class_name != WITH_PICTURE:
        return InputMedia()
    slots = ("first_frame", "last_frame")
    most = 1 if not config.image_positions and (_first(pipeline) or config.image_dim) else 2
    needed = slots if config.image_positions else slots[:1]
    rule = InputRule(type="image", least=len(needed), most=most, slots=slots[:most], required_slots=needed)
    return InputMedia(rules=(rule,), order="within_type")


def _first(pipeline: Pipeline) -> bool:
    return bool(pipeline.options.get("expand_timesteps"))


def _seers(config: WanConfig) -> tuple[str, ...]:
    return ("image_encoder", "image_processor") if config.image_dim else ()


def _components(pipeline: Pipeline, config: WanConfig) -> tuple[Component, ...]:
    seers = (Component(name="image_encoder"), Component(name="image_processor", kind="processor"))
    experts = [Component(name=name, trained=True) for name in _experts(pipeline)]
    return (
        *experts,
        Component(name="vae"),
        Component(name="text_encoder"),
        Component(name="tokenizer", kind="tokenizer"),
        Component(name="scheduler", kind="scheduler"),
        *(seers if pipeline.class_name == WITH_PICTURE and _seers(config) else ()),
    )


def _experts(pipeline: Pipeline) -> tuple[str, ...]:
    """The transformers that there are.

    Raises:
        ModelError: there is one, but a boundary to another; or two, and no boundary.
    """
    found = tuple(name for name in EXPERTS if pipeline.index.get(name) is not None)
    boundary = pipeline.options.get("boundary_ratio")
    if found != EXPERTS[: 1 if boundary is None else 2]:
        raise ModelError(
            f"a {pipeline.class_name} has transformer_2 where it has a boundary_ratio, and nowhere else, "
            f"received {', '.join(found) or 'no transformer'} and boundary_ratio {boundary}"
        )
    return found


def _own(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): leaf for name, leaf in params.items() if name.startswith(prefix)}


def _features(parts: Parts, pictures: list[torch.Tensor]) -> torch.Tensor:
    """The states before the last layer of the image encoder, [1, P, E]; those of several pictures one behind the other."""
    encoder = parts["image_encoder"]
    bytes_ = [(one * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy() for one in pictures]
    pixels = parts["image_processor"](images=bytes_, return_tensors="pt")["pixel_values"]
    states: torch.Tensor = encoder(pixels.to(encoder.device, encoder.dtype), output_hidden_states=True).hidden_states[
        -2
    ]
    return states.flatten(0, 1)[None]


def adapter(pipeline: Pipeline, setting: Setting) -> WanAdapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    scheduler = pipeline.configs["scheduler"]
    unipc = scheduler.get("_class_name") == "UniPCMultistepScheduler"
    levels = unipc_levels(scheduler) if unipc else euler_levels(scheduler, 0, even=False)
    boundary = float(pipeline.options.get("boundary_ratio") or 0.0)
    if setting.trained == EXPERTS[:1]:
        levels = attrs.evolve(levels, low=boundary)
    elif setting.trained == EXPERTS[1:]:
        levels = attrs.evolve(levels, high=boundary)
    if pipeline.class_name == WITH_VIDEO:
        levels = attrs.evolve(levels, strength=STRENGTH)
    return WanAdapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=levels,
        config=config_from_hf(pipeline.configs["transformer"]),
        networks=tuple(
            diffusers_module(CLASS, pipeline.configs[name], compiled=setting.compiled) for name in _experts(pipeline)
        ),
        boundary=boundary,
        compression=compression(pipeline.configs["vae"]),
        first=_first(pipeline),
        pipeline=pipeline.class_name,
        guidance_2=setting.guidance_2,
    )
