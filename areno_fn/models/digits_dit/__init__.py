"""A small diffusion transformer for pictures of a class, the DiT of diffusers (arXiv 2212.09748): its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.contracts.calls import require_types
from areno_fn.contracts.errors import ModelError
from areno_fn.models.flow_fields import flow_fields, out_channels

CLASS = "DiTTransformer2DModel"


@attrs.frozen(kw_only=True)
class DiTConfig:
    """All that decides the function, apart from the parameters. The default is that of 8 x 8 digits.

    Attributes:
        num_classes: class labels are below it; the label `num_classes` itself stands for no class.
        sample_size: S, side of a picture, a multiple of the patch.
        channels: C of a picture.
        patch_size: P, side of a patch; there are (S / P)^2 tokens.
        num_layers: number of blocks.
        num_heads, head_dim: heads and channels of a head; their product D is a multiple of 4.
    """

    num_classes: int = 10
    sample_size: int = 8
    channels: int = 1
    patch_size: int = 2
    num_layers: int = 4
    num_heads: int = 4
    head_dim: int = 24

    def __attrs_post_init__(self) -> None:
        require_types(self)
        for field in attrs.fields(DiTConfig):
            if getattr(self, field.name) < 1:
                raise ModelError(f"{field.name} must be at least 1, received {getattr(self, field.name)}")
        if self.sample_size % self.patch_size:
            raise ModelError(f"sample_size {self.sample_size} is not a multiple of patch_size {self.patch_size}")
        if self.width % 4:
            raise ModelError(f"num_heads times head_dim must be a multiple of 4 for positions, received {self.width}")

    @property
    def width(self) -> int:
        """D."""
        return self.num_heads * self.head_dim

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return self.sample_size // self.patch_size

    @property
    def patch(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch_size**2


def config_from_hf(hf: Mapping[str, Any]) -> DiTConfig:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    fields = flow_fields(hf, CLASS, nullable=("out_channels",), function=("dropout", "norm_num_groups"))
    channels = fields.integer("in_channels", default=4)
    config = DiTConfig(
        num_classes=fields.integer("num_embeds_ada_norm", default=1000),
        sample_size=fields.integer("sample_size", default=32),
        channels=channels,
        patch_size=fields.integer("patch_size", default=2),
        num_layers=fields.integer("num_layers", default=28),
        num_heads=fields.integer("num_attention_heads", default=16),
        head_dim=fields.integer("attention_head_dim", default=72),
    )
    if out_channels(fields, hf, channels, default=None) != channels:
        raise fields.error(
            f"out_channels must be the {channels} channels that go in, since a velocity is of that shape"
        )
    fields.expect("attention_bias", True)
    fields.expect("activation_fn", "gelu-approximate")
    fields.expect("upcast_attention", False)
    fields.expect("norm_type", "ada_norm_zero")
    fields.expect("norm_elementwise_affine", False)
    fields.expect("norm_eps", 1e-5)
    fields.finish()
    return config


def config_to_hf(config: DiTConfig) -> dict[str, Any]:
    """The contents of a config.json from which diffusers makes the same model."""
    return {
        "_class_name": CLASS,
        "num_embeds_ada_norm": config.num_classes,
        "sample_size": config.sample_size,
        "in_channels": config.channels,
        "out_channels": config.channels,
        "patch_size": config.patch_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
    }
