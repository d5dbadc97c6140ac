"""LTX-2: a stream of video and one of audio, each attending to itself, to text, and to the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.fields import Fields
from areno_fn.models.flow_fields import flow_fields

CLASS = "LTX2VideoTransformer3DModel"
_FUNCTION = (
    "patch_size", "patch_size_t", "vae_scale_factors", "pos_embed_max_pos", "base_height", "base_width",
    "audio_patch_size", "audio_patch_size_t", "audio_scale_factor", "audio_pos_embed_max_pos", "audio_sampling_rate",
    "audio_hop_length", "norm_eps", "rope_theta", "rope_double_precision", "causal_offset", "rope_type",
    "timestep_scale_multiplier", "cross_attn_timestep_scale_multiplier", "perturbed_attn",
)  # fmt: skip
"""Fields that change what is computed, but not which tensors there are; patches are folded outside the transformer."""


@attrs.frozen(kw_only=True)
class Stream:
    """One of the two streams.

    Attributes:
        num_heads, head_dim: heads and channels of a head.
        in_channels, out_channels: of the latents.
        text_dim: channels of the text that is attended to.
        gated: every head has a gate.
        text_modulated: what attends to the text is modulated as well.
        ff_bias: the layers of the network have biases.
    """

    num_heads: int
    head_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    gated: bool
    text_modulated: bool
    ff_bias: bool

    @property
    def width(self) -> int:
        """Channels of the stream."""
        return self.num_heads * self.head_dim


@attrs.frozen(kw_only=True)
class LTX2Config:
    """The sizes from which the tensors of an `LTX2VideoTransformer3DModel` follow.

    Attributes:
        num_layers: blocks.
        video, audio: the streams.
        caption_channels: of the text before it is projected; 0: it is projected elsewhere.
        attention_bias, attention_out_bias: projections into, and out of, attention have biases.
        norm_weights: the norms of a block have weights.
        prompt_time: keys and values of the text are modulated by time.
        keyframe_positions: keyframes have a learned position.
    """

    num_layers: int
    video: Stream
    audio: Stream
    caption_channels: int
    attention_bias: bool
    attention_out_bias: bool
    norm_weights: bool
    prompt_time: bool
    keyframe_positions: bool


def config_from_hf(hf: Mapping[str, Any]) -> LTX2Config:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    fields = flow_fields(hf, CLASS, nullable=("out_channels", "audio_out_channels"), function=_FUNCTION)
    fields.expect("activation_fn", "gelu-approximate")
    fields.expect("qk_norm", "rms_norm_across_heads")
    projected = fields.boolean("use_prompt_embeddings", default=True)
    captions = fields.integer("caption_channels", default=3840)
    config = LTX2Config(
        num_layers=fields.integer("num_layers", default=48),
        video=_stream(fields, hf, "", head_dim=128, text_dim=4096),
        audio=_stream(fields, hf, "audio_", head_dim=64, text_dim=2048),
        caption_channels=captions if projected else 0,
        attention_bias=fields.boolean("attention_bias", default=True),
        attention_out_bias=fields.boolean("attention_out_bias", default=True),
        norm_weights=fields.boolean("norm_elementwise_affine", default=False),
        prompt_time=fields.boolean("use_prompt_adaln_single", default=True),
        keyframe_positions=fields.boolean("use_keyframes_abs_pos_embedding", default=False),
    )
    fields.finish()
    return config


def _stream(fields: Fields, hf: Mapping[str, Any], prefix: str, *, head_dim: int, text_dim: int) -> Stream:
    in_channels = fields.integer(f"{prefix}in_channels", default=128)
    absent = in_channels if f"{prefix}out_channels" in hf else 128
    return Stream(
        num_heads=fields.integer(f"{prefix}num_attention_heads", default=32),
        head_dim=fields.integer(f"{prefix}attention_head_dim", default=head_dim),
        in_channels=in_channels,
        out_channels=fields.integer(f"{prefix}out_channels", default=absent),
        text_dim=fields.integer(f"{prefix}cross_attention_dim", default=text_dim),
        gated=fields.boolean(f"{prefix}gated_attn", default=False),
        text_modulated=fields.boolean(f"{prefix}cross_attn_mod", default=False),
        ff_bias=fields.boolean(f"{prefix}ff_bias", default=True),
    )


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    two = {
        "_class_name": CLASS, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3,
        "out_channels": 5, "cross_attention_dim": 16, "audio_num_attention_heads": 4, "audio_attention_head_dim": 2,
        "audio_in_channels": 6, "audio_out_channels": None, "audio_cross_attention_dim": 8, "caption_channels": 10,
        "rope_type": "split",
    }  # fmt: skip
    modulated = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
    return {
        "2": two,
        "2.3": two | modulated | {"use_prompt_embeddings": False},
        "2.5": two | modulated | {
            "use_prompt_embeddings": False, "use_prompt_adaln_single": False, "ff_bias": False,
            "use_keyframes_abs_pos_embedding": True,
        },
        "only audio is modulated": two | {"audio_cross_attn_mod": True, "audio_gated_attn": True},
        "norms with weights, attention without biases": two | {
            "norm_elementwise_affine": True, "attention_bias": False, "attention_out_bias": False,
            "audio_ff_bias": False,
        },
    }  # fmt: skip
