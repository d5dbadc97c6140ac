"""Wan 2.1 and 2.2: video that attends to itself and then to text, and to the features of an image where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.flow_fields import flow_fields, out_channels

CLASS = "WanTransformer3DModel"


@attrs.frozen(kw_only=True)
class WanConfig:
    """The sizes from which the tensors of a `WanTransformer3DModel` follow.

    Attributes:
        num_layers: blocks.
        num_heads, head_dim: heads and channels of a head.
        inner: channels between the two layers of a block's network.
        patch_size: frames, height and width of a patch.
        in_channels, out_channels: of the latent video.
        text_dim, freq_dim: channels of the text, and of the sinusoids of time.
        cross_attn_norm: what attends to the text is normalised with a weight and a bias.
        image_dim: channels of the features of an image; 0: there is none.
        added_kv_dim: channels from which its keys and values are projected; 0: they are not.
        image_positions: features of images for which a position is stored; 0: none is.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    inner: int
    patch_size: tuple[int, int, int]
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    cross_attn_norm: bool
    image_dim: int
    added_kv_dim: int
    image_positions: int

    @property
    def width(self) -> int:
        """Channels of the stream."""
        return self.num_heads * self.head_dim


def config_from_hf(hf: Mapping[str, Any]) -> WanConfig:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    nullable = ("out_channels", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
    fields = flow_fields(hf, CLASS, nullable=nullable, function=("eps", "rope_max_seq_len"))
    fields.expect("qk_norm", "rms_norm_across_heads")
    patch = fields.integers("patch_size", default=(1, 2, 2), least=1)
    if len(patch) != 3:
        raise fields.error(f"patch_size must be frames, height and width, received {patch}")
    in_channels = fields.integer("in_channels", default=16)
    config = WanConfig(
        num_layers=fields.integer("num_layers", default=40),
        num_heads=fields.integer("num_attention_heads", default=40),
        head_dim=fields.integer("attention_head_dim", default=128),
        inner=fields.integer("ffn_dim", default=13824),
        patch_size=patch,
        in_channels=in_channels,
        out_channels=out_channels(fields, hf, in_channels, default=16),
        text_dim=fields.integer("text_dim", default=4096),
        freq_dim=fields.integer("freq_dim", default=256),
        cross_attn_norm=fields.boolean("cross_attn_norm", default=True),
        image_dim=fields.integer("image_dim", default=None) or 0,
        added_kv_dim=fields.integer("added_kv_proj_dim", default=None) or 0,
        image_positions=fields.integer("pos_embed_seq_len", default=None) or 0,
    )
    fields.finish()
    return config


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    text = {
        "_class_name": CLASS, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 20,
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 8,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 16,
    }  # fmt: skip
    image = text | {"in_channels": 9, "image_dim": 14, "added_kv_proj_dim": 24}
    return {
        "text to video": text | {"image_dim": None, "added_kv_proj_dim": None, "pos_embed_seq_len": None},
        "image to video": image,
        "first and last frame to video": image | {"pos_embed_seq_len": 6},
        "image in the channels": text | {"in_channels": 9},
        "without cross norm": text | {"cross_attn_norm": False, "out_channels": None, "patch_size": [2, 1, 3]},
    }
