"""Stable Diffusion 3 and 3.5: two streams that attend jointly, the last block without an output for the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.flow_fields import flow_fields, out_channels

CLASS = "SD3Transformer2DModel"


@attrs.frozen(kw_only=True)
class SD3Config:
    """The sizes from which the tensors of an `SD3Transformer2DModel` follow.

    Attributes:
        num_layers: joint blocks.
        num_heads, head_dim: heads and channels of a head.
        patch_size, in_channels, out_channels: of the latent image.
        joint_attention_dim, pooled_projection_dim: channels of the text, and of its pooled vector.
        pos_embed_max_size: side of the stored grid of positions; 0: none is stored.
        dual_attention_layers: blocks in which the image attends to itself once more.
        qk_norm: queries and keys are normalised per head.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    in_channels: int
    out_channels: int
    joint_attention_dim: int
    pooled_projection_dim: int
    pos_embed_max_size: int
    dual_attention_layers: tuple[int, ...]
    qk_norm: bool

    @property
    def width(self) -> int:
        """Channels of both streams."""
        return self.num_heads * self.head_dim


def config_from_hf(hf: Mapping[str, Any]) -> SD3Config:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    nullable = ("out_channels", "pos_embed_max_size", "qk_norm")
    fields = flow_fields(hf, CLASS, nullable=nullable, function=("sample_size",))
    in_channels = fields.integer("in_channels", default=16)
    grid = None if "pos_embed_max_size" in hf else 96  # null: the grid is computed, not stored
    config = SD3Config(
        num_layers=fields.integer("num_layers", default=18),
        num_heads=fields.integer("num_attention_heads", default=18),
        head_dim=fields.integer("attention_head_dim", default=64),
        patch_size=fields.integer("patch_size", default=2),
        in_channels=in_channels,
        out_channels=out_channels(fields, hf, in_channels, default=16),
        joint_attention_dim=fields.integer("joint_attention_dim", default=4096),
        pooled_projection_dim=fields.integer("pooled_projection_dim", default=2048),
        pos_embed_max_size=fields.integer("pos_embed_max_size", default=grid) or 0,
        dual_attention_layers=fields.integers("dual_attention_layers", default=()),
        qk_norm=fields.text("qk_norm", default="") != "",
    )
    fields.expect("qk_norm", "rms_norm")
    caption = fields.integer("caption_projection_dim", default=1152)
    if caption != config.width:
        raise fields.error(f"caption_projection_dim is {caption}, but heads times their channels are {config.width}")
    if any(layer >= config.num_layers for layer in config.dual_attention_layers):
        raise fields.error(
            f"dual_attention_layers has {max(config.dual_attention_layers)}, but there are {config.num_layers} layers"
        )
    fields.finish()
    return config


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    plain = {
        "_class_name": CLASS, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2,
        "in_channels": 3, "out_channels": 5, "joint_attention_dim": 12, "caption_projection_dim": 16,
        "pooled_projection_dim": 10, "sample_size": 8, "pos_embed_max_size": 4,
    }  # fmt: skip
    return {
        "3": plain,
        "3.5 large": plain | {"qk_norm": "rms_norm"},
        "3.5 medium": plain | {"qk_norm": "rms_norm", "dual_attention_layers": [0, 1]},
        "one layer": plain | {"num_layers": 1, "dual_attention_layers": [0], "out_channels": None},
        "no stored positions": plain | {"pos_embed_max_size": None},
    }
