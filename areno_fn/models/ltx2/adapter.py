"""LTX-2 as a pipeline: video with its sound, which are drawn together as one flat latent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from areno_fn.contracts.components import Component
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import Lengths, Made, NoiseLevels, Parts, Pipeline, Setting, StreamGuidance
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import MediaType, Request
from areno_fn.contracts.pipeline_io import Output, PipelineIOContract
from areno_fn.models.diffusers_module import diffusers_module
from areno_fn.models.ltx2 import CLASS, config_from_hf, sound
from areno_fn.models.ltx2.velocity import Streams, guide, velocity
from areno_fn.models.module_function import ModuleFunction
from areno_fn.models.noise_levels import euler_levels
from areno_fn.models.packing import packed, unpacked
from areno_fn.models.pipeline_words import bare_pipeline, conditions_of, length_as_put
from areno_fn.models.video_codec import require_videos

TEXT = 1024
"""States of a prompt."""

RATE = 24
"""Frames a second."""

PERTURBED = (28,)
"""Blocks in which the pipeline perturbs attention where nothing is said."""

COMPONENTS = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="audio_vae"),
    Component(name="vocoder"),
    Component(name="connectors"),
    Component(name="text_encoder"),
    Component(name="tokenizer", kind="tokenizer"),
    Component(name="scheduler", kind="scheduler"),
)


def contract(pipeline: Pipeline) -> PipelineIOContract:
    """What this checkpoint takes and makes.

    Raises:
        ModelError: a configuration that is not supported.
    """
    hf = pipeline.configs["transformer"]
    config = config_from_hf(hf)
    sides = {name: hf.get(name, 1) for name in ("patch_size", "patch_size_t")}
    for stream in (config.video, config.audio):
        if stream.in_channels != stream.out_channels or set(sides.values()) != {1}:
            raise ModelError(
                f"an LTX2Pipeline takes a latent as a token and gets as many channels back, but its transformer takes "
                f"{stream.in_channels}, returns {stream.out_channels}, and has patches of {sides}"
            )
    space, time = compression(pipeline.configs["vae"])
    usual = Size(height=16 * space, width=24 * space, frames=15 * time + 1)
    heard = pipeline.configs["vocoder"]
    return PipelineIOContract(
        family="ltx2",
        outputs=(
            Output(type="video", rate=RATE),
            Output(type="audio", channels=heard.get("out_channels", 2), rate=_heard_rate(heard)),
        ),
        geometry=Geometry(multiple=space, frames_multiple=time, default=usual),
        components=COMPONENTS,
        preparer=("text_encoder", "tokenizer", "connectors"),
        codec=("vae", "audio_vae", "vocoder"),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )


@attrs.frozen(kw_only=True, eq=False)
class LTX2Adapter:
    """The `FlowAdapter` of a checkpoint at one size. States are flat: the tokens of the video, then those of the sound.

    Attributes:
        leading: how guidance leads the two.
        blocks: where it perturbs attention; none where the transformer has no such blocks, or is not led away from them.
    """

    contract: PipelineIOContract
    size: Size
    levels: NoiseLevels
    network: ModuleFunction
    streams: Streams
    leading: StreamGuidance
    blocks: tuple[int, ...]

    def computing_again(self, every: int) -> LTX2Adapter:
        """The same adapter, every so many-th of whose blocks keeps its input alone; 0 for none."""
        return attrs.evolve(self, network=self.network.computing_again(every))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """All numbers of both."""
        return (self.streams.numel,)

    @property
    def components(self) -> tuple[tuple[MediaType, tuple[int, ...]], ...]:
        """Tokens of the video, and of the sound."""
        streams = self.streams
        frames, height, width = streams.grid
        return (
            ("video", (frames * height * width, streams.channels)),
            ("audio", (streams.length, streams.audio_channels)),
        )

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        """The velocity [B, n]; the condition is {"text": [B, L, D], "audio_text": [B, L, E], "words": [B, L]}."""
        return self._asked(params, state, timestep, condition)

    def guide(
        self, towards: torch.Tensor, away: torch.Tensor, scale: float, state: torch.Tensor, timestep: torch.Tensor
    ) -> torch.Tensor:
        """The velocity [B, n] of guidance by words alone, rescaled stream by stream."""
        return self._led(towards, [self._weighed(away, scale)], state, timestep)

    def led(
        self, params: Any, state: torch.Tensor, timestep: torch.Tensor, positive: Any, negative: Any, scale: float
    ) -> torch.Tensor:
        """The velocity [B, n] of guidance by words, by perturbed attention and by either stream alone."""
        both = {name: torch.cat([negative[name], positive[name]]) for name in positive}
        answer = self._asked(params, torch.cat([state, state]), torch.cat([timestep, timestep]), both)
        without, towards = answer.tensor_split(2)
        away = [self._weighed(without, scale)]
        if self.blocks:
            found = self._asked(params, state, timestep, positive, perturbed=self.blocks)
            away.append((found, self.leading.perturbed, self.leading.perturbed))
        if self.leading.isolated > 1:
            found = self._asked(params, state, timestep, positive, isolated=True)
            away.append((found, self.leading.isolated - 1, self.leading.isolated - 1))
        return self._led(towards, away, state, timestep)

    def _weighed(self, away: torch.Tensor, scale: float) -> tuple[torch.Tensor, float, float]:
        return away, scale - 1, self.leading.audio - 1

    def _led(
        self,
        towards: torch.Tensor,
        away: Sequence[tuple[torch.Tensor, float, float]],
        state: torch.Tensor,
        timestep: torch.Tensor,
    ) -> torch.Tensor:
        return guide(towards, away, state, timestep, streams=self.streams, rescale=self.leading.rescale)

    def _asked(
        self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any, **otherwise: Any
    ) -> torch.Tensor:
        def forward(**inputs: Any) -> Any:
            return self.network(params, **inputs)

        state = state.to(params["proj_in.bias"].dtype)
        return velocity(forward, state, timestep, condition, streams=self.streams, rate=float(RATE), **otherwise)

    def encode_conditions(self, parts: Parts, request: Request, *, negative: bool) -> Conditions:
        """What the connectors make of all layers of the text encoder, for either stream."""
        words = bare_pipeline("LTX2Pipeline", {name: parts[name] for name in ("text_encoder", "tokenizer")})

        def said(prompt: str) -> dict[str, torch.Tensor]:
            given = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT}
            states, mask, _, _ = words.encode_prompt([prompt], device=parts["text_encoder"].device, **given)
            side = parts["tokenizer"].padding_side
            connectors = parts["connectors"]
            text, audio_text, marks = connectors(states.to(connectors.dtype), mask, padding_side=side)
            return {"text": text, "audio_text": audio_text, "words": marks}

        return conditions_of(request, said, negative=negative)

    def lengths(self, parts: Parts, prompt: str) -> Lengths:
        """How long a prompt is for the text encoder."""
        given = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT}
        return {"tokenizer": length_as_put("LTX2Pipeline", parts["tokenizer"], prompt, **given)}

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, n] of videos and their sound."""
        require_videos(made["video"], self.size.frames, self.size.height, self.size.width)
        vae = parts["vae"]
        pixels = (2 * made["video"].transpose(1, 2) - 1).to(device=vae.device, dtype=vae.dtype)
        mean, std = _statistics(vae)
        seen = (vae.encode(pixels).latent_dist.mode() - mean) * vae.config.scaling_factor / std
        rate = next(one.rate for one in self.contract.outputs if one.type == "audio")
        heard = sound.encoded(parts["audio_vae"], made["audio"], rate, self.streams.length)
        return self.streams.join(packed(seen, 1), heard.to(seen))

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """Videos of latents, and their sound."""
        vae = parts["vae"]
        seen, heard = self.streams.split(latents)
        mean, std = _statistics(vae)
        spread = unpacked(seen.to(device=vae.device, dtype=vae.dtype), self.streams.grid, 1)
        time = spread.new_zeros(spread.shape[0]) if vae.config.timestep_conditioning else None
        pixels = vae.decode(spread * std / vae.config.scaling_factor + mean, time, return_dict=False)[0]
        video = (pixels.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)
        return {"video": video, "audio": sound.decoded(parts["audio_vae"], parts["vocoder"], heard)}


def compression(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many pixels along a side, and how many frames, become one latent."""
    scaling = config.get("spatio_temporal_scaling", (True, True, True, True))
    stages = int(sum(scaling)) if isinstance(scaling, list | tuple) else 4 * int(scaling)
    space, time = (config.get(f"{name}_compression_ratio") for name in ("spatial", "temporal"))
    return (
        config.get("patch_size", 4) * 2**stages if space is None else space,
        config.get("patch_size_t", 1) * 2**stages if time is None else time,
    )


def _heard_rate(config: Mapping[str, Any]) -> int:
    return int(config.get("output_sampling_rate", 24000))


def _statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return vae.latents_mean[:, None, None, None], vae.latents_std[:, None, None, None]


def _streams(pipeline: Pipeline, size: Size) -> Streams:
    config, audio = config_from_hf(pipeline.configs["transformer"]), pipeline.configs["audio_vae"]
    space, time = compression(pipeline.configs["vae"])
    per_second = audio.get("sample_rate", 16000) / audio.get("mel_hop_length", 160) / sound.COMPRESSION
    return Streams(
        grid=((size.frames - 1) // time + 1, size.height // space, size.width // space),
        channels=config.video.in_channels,
        length=round(size.frames / RATE * per_second),
        audio_channels=config.audio.in_channels,
    )


def adapter(pipeline: Pipeline, setting: Setting) -> LTX2Adapter:
    """The adapter of a checkpoint.

    Raises:
        ModelError: a configuration that is not supported, or diffusers is missing.
    """
    streams = _streams(pipeline, setting.size)
    frames, height, width = streams.grid
    leading = setting.streams or StreamGuidance()
    return LTX2Adapter(
        contract=contract(pipeline),
        size=setting.size,
        levels=euler_levels(pipeline.configs["scheduler"], frames * height * width, even=True),
        network=diffusers_module(CLASS, pipeline.configs["transformer"], compiled=setting.compiled),
        streams=streams,
        leading=leading,
        blocks=_perturbed(pipeline.configs["transformer"], leading),
    )


def _perturbed(hf: Mapping[str, Any], leading: StreamGuidance) -> tuple[int, ...]:
    """The blocks whose attention guidance perturbs; those of the pipeline may not be there, and then are led by nothing.

    Raises:
        ModelError: blocks are named that are not there, or of a transformer that is not made for it.
    """
    layers, made_for = config_from_hf(hf).num_layers, bool(hf.get("perturbed_attn", False))
    outside = [block for block in leading.blocks if block >= layers]
    if outside:
        raise ModelError(f"streams.blocks: there is no block {outside[0]} of {layers}, which are counted from 0")
    if leading.blocks and not made_for:
        raise ModelError(
            "streams.blocks: attention of this transformer cannot be perturbed, perturbed_attn is not true in its config.json; "
            "leave them out"
        )
    named = leading.blocks or tuple(block for block in PERTURBED if block < layers)
    return named if made_for and leading.perturbed else ()
