"""Qwen-Image (and Edit, Layered): blocks of two streams, each with its own modulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.flow_fields import flow_fields, out_channels

CLASS = "QwenImageTransformer2DModel"


@attrs.frozen(kw_only=True)
class QwenImageConfig:
    """The sizes from which the tensors of a `QwenImageTransformer2DModel` follow.

    Attributes:
        num_layers: blocks of two streams.
        num_heads, head_dim: heads and channels of a head.
        patch_size, in_channels, out_channels: of the packed latent image.
        joint_attention_dim: channels of the text.
        use_additional_t_cond: a second condition of two values is added to the time.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    in_channels: int
    out_channels: int
    joint_attention_dim: int
    use_additional_t_cond: bool

    @property
    def width(self) -> int:
        """Channels of both streams."""
        return self.num_heads * self.head_dim


def config_from_hf(hf: Mapping[str, Any]) -> QwenImageConfig:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    # pooled_projection_dim stands in the published file of Qwen-Image; no tensor and no computation has it
    function = ("axes_dims_rope", "guidance_embeds", "zero_cond_t", "use_layer3d_rope", "pooled_projection_dim")
    fields = flow_fields(hf, CLASS, nullable=("out_channels",), function=function)
    in_channels = fields.integer("in_channels", default=64)
    config = QwenImageConfig(
        num_layers=fields.integer("num_layers", default=60),
        num_heads=fields.integer("num_attention_heads", default=24),
        head_dim=fields.integer("attention_head_dim", default=128),
        patch_size=fields.integer("patch_size", default=2),
        in_channels=in_channels,
        out_channels=out_channels(fields, hf, in_channels, default=16),
        joint_attention_dim=fields.integer("joint_attention_dim", default=3584),
        use_additional_t_cond=fields.boolean("use_additional_t_cond", default=False),
    )
    fields.finish()
    return config


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    image = {
        "_class_name": CLASS, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "patch_size": 2,
        "in_channels": 16, "out_channels": 4, "joint_attention_dim": 12, "axes_dims_rope": [4, 6, 6],
    }  # fmt: skip
    return {
        "image": image,
        "edit": image | {"zero_cond_t": True},
        "layered": image | {"use_additional_t_cond": True, "use_layer3d_rope": True},
        "as many channels out as in": image | {"out_channels": None, "patch_size": 1},
    }
