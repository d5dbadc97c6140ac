"""Flux.1 (dev, schnell, Kontext, Fill): blocks of two streams, then blocks of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.flow_fields import flow_fields, out_channels

CLASS = "FluxTransformer2DModel"


@attrs.frozen(kw_only=True)
class FluxConfig:
    """The sizes from which the tensors of a `FluxTransformer2DModel` follow.

    Attributes:
        num_layers, num_single_layers: blocks of two streams, and of one.
        num_heads, head_dim: heads and channels of a head.
        patch_size, in_channels, out_channels: of the packed latent image.
        joint_attention_dim, pooled_projection_dim: channels of the text, and of its pooled vector.
        guidance_embeds: the guidance scale is an input.
    """

    num_layers: int
    num_single_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    in_channels: int
    out_channels: int
    joint_attention_dim: int
    pooled_projection_dim: int
    guidance_embeds: bool

    @property
    def width(self) -> int:
        """Channels of both streams."""
        return self.num_heads * self.head_dim


def config_from_hf(hf: Mapping[str, Any]) -> FluxConfig:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    fields = flow_fields(hf, CLASS, nullable=("out_channels",), function=("axes_dims_rope",))
    in_channels = fields.integer("in_channels", default=64)
    config = FluxConfig(
        num_layers=fields.integer("num_layers", default=19, least=0),
        num_single_layers=fields.integer("num_single_layers", default=38, least=0),
        num_heads=fields.integer("num_attention_heads", default=24),
        head_dim=fields.integer("attention_head_dim", default=128),
        patch_size=fields.integer("patch_size", default=1),
        in_channels=in_channels,
        out_channels=out_channels(fields, hf, in_channels, default=None),
        joint_attention_dim=fields.integer("joint_attention_dim", default=4096),
        pooled_projection_dim=fields.integer("pooled_projection_dim", default=768),
        guidance_embeds=fields.boolean("guidance_embeds", default=False),
    )
    fields.finish()
    return config


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    schnell = {
        "_class_name": CLASS, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2,
        "attention_head_dim": 16, "patch_size": 1, "in_channels": 4, "joint_attention_dim": 12,
        "pooled_projection_dim": 10, "axes_dims_rope": [4, 4, 8],
    }  # fmt: skip
    return {
        "schnell": schnell,
        "dev": schnell | {"guidance_embeds": True},
        "fill": schnell | {"guidance_embeds": True, "in_channels": 20, "out_channels": 4},
        "patches": schnell | {"patch_size": 2, "out_channels": None},
        "two streams only": schnell | {"num_single_layers": 0},
    }
