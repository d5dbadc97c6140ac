"""Flux.2 (dev, Klein): no biases, one modulation for all blocks of a kind, fused projections in blocks of one stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.flow_fields import flow_fields, out_channels

CLASS = "Flux2Transformer2DModel"


@attrs.frozen(kw_only=True)
class Flux2Config:
    """The sizes from which the tensors of a `Flux2Transformer2DModel` follow.

    Attributes:
        num_layers, num_single_layers: blocks of two streams, and of one.
        num_heads, head_dim: heads and channels of a head.
        inner: channels between the two layers of a gated network.
        patch_size, in_channels, out_channels: of the packed latent image.
        joint_attention_dim: channels of the text.
        timestep_guidance_channels: channels of the sinusoids of time and guidance.
        guidance_embeds: the guidance scale is an input.
    """

    num_layers: int
    num_single_layers: int
    num_heads: int
    head_dim: int
    inner: int
    patch_size: int
    in_channels: int
    out_channels: int
    joint_attention_dim: int
    timestep_guidance_channels: int
    guidance_embeds: bool

    @property
    def width(self) -> int:
        """Channels of both streams."""
        return self.num_heads * self.head_dim


def config_from_hf(hf: Mapping[str, Any]) -> Flux2Config:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    function = ("axes_dims_rope", "rope_theta", "eps")
    fields = flow_fields(hf, CLASS, nullable=("out_channels",), function=function)
    in_channels = fields.integer("in_channels", default=128)
    heads = fields.integer("num_attention_heads", default=48)
    head_dim = fields.integer("attention_head_dim", default=128)
    config = Flux2Config(
        num_layers=fields.integer("num_layers", default=8, least=0),
        num_single_layers=fields.integer("num_single_layers", default=48, least=0),
        num_heads=heads,
        head_dim=head_dim,
        inner=int(heads * head_dim * fields.number("mlp_ratio", default=3.0, above=0)),
        patch_size=fields.integer("patch_size", default=1),
        in_channels=in_channels,
        out_channels=out_channels(fields, hf, in_channels, default=None),
        joint_attention_dim=fields.integer("joint_attention_dim", default=15360),
        timestep_guidance_channels=fields.integer("timestep_guidance_channels", default=256),
        guidance_embeds=fields.boolean("guidance_embeds", default=True),
    )
    fields.finish()
    return config


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    dev = {
        "_class_name": CLASS, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2,
        "attention_head_dim": 16, "in_channels": 4, "joint_attention_dim": 12, "timestep_guidance_channels": 8,
        "axes_dims_rope": [4, 4, 4, 4],
    }  # fmt: skip
    return {
        "dev": dev,
        "klein": dev | {"guidance_embeds": False, "num_single_layers": 3},
        "uneven ratio": dev | {"mlp_ratio": 2.7, "out_channels": 6, "patch_size": 2},
        "one stream only": dev | {"num_layers": 0, "out_channels": None},
    }
