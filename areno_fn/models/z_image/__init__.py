"""Z-Image (base, Turbo, Omni): one stream of text and image, each refined apart before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.flow_fields import flow_fields

CLASS = "ZImageTransformer2DModel"


@attrs.frozen(kw_only=True)
class ZImageConfig:
    """The sizes from which the tensors of a `ZImageTransformer2DModel` follow.

    Attributes:
        num_layers, num_refiner_layers: blocks of the whole stream, and of each refiner.
        num_heads, head_dim: heads and channels of a head.
        in_channels: of the latent image, in and out.
        patches: sides of the patches that can be read, each with its number of frames.
        cap_feat_dim: channels of the text.
        siglip_feat_dim: channels of the features of a second image; 0: there is none.
        qk_norm: queries and keys are normalised per head.
    """

    num_layers: int
    num_refiner_layers: int
    num_heads: int
    head_dim: int
    in_channels: int
    patches: tuple[tuple[int, int], ...]
    cap_feat_dim: int
    siglip_feat_dim: int
    qk_norm: bool

    @property
    def width(self) -> int:
        """Channels of the stream."""
        return self.num_heads * self.head_dim


def config_from_hf(hf: Mapping[str, Any]) -> ZImageConfig:
    """Reads the transformer's config.json.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    function = ("norm_eps", "rope_theta", "t_scale", "axes_dims", "axes_lens")
    fields = flow_fields(hf, CLASS, nullable=("siglip_feat_dim",), function=function)
    width, heads = fields.integer("dim", default=3840), fields.integer("n_heads", default=30)
    fields.expect("nheads", heads)  # a second name, found in some published files
    kv_heads = fields.integer("n_kv_heads", default=30)
    if width % heads or kv_heads != heads:
        raise fields.error(f"dim {width} must be a multiple of n_heads {heads}, and n_kv_heads {kv_heads} equal to it")
    sides = fields.integers("all_patch_size", default=(2,), least=1)
    frames = fields.integers("all_f_patch_size", default=(1,), least=1)
    patches = tuple(zip(sides, frames, strict=False))
    if len(sides) != len(frames) or not sides or len(set(patches)) < len(patches):
        raise fields.error(f"all_patch_size {sides} and all_f_patch_size {frames} must pair up to distinct patches")
    config = ZImageConfig(
        num_layers=fields.integer("n_layers", default=30),
        num_refiner_layers=fields.integer("n_refiner_layers", default=2, least=0),
        num_heads=heads,
        head_dim=width // heads,
        in_channels=fields.integer("in_channels", default=16),
        patches=patches,
        cap_feat_dim=fields.integer("cap_feat_dim", default=2560),
        siglip_feat_dim=fields.integer("siglip_feat_dim", default=None) or 0,
        qk_norm=fields.boolean("qk_norm", default=True),
    )
    fields.finish()
    return config


def tiny() -> dict[str, dict[str, Any]]:
    """Small configurations by variant, as in a config.json."""
    image = {
        "_class_name": CLASS, "dim": 24, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "n_refiner_layers": 1,
        "in_channels": 3, "cap_feat_dim": 12, "axes_dims": [4, 4, 4], "axes_lens": [64, 8, 8],
    }  # fmt: skip
    return {
        "image": image | {"nheads": 2},
        "without qk norm": image | {"qk_norm": False, "siglip_feat_dim": None},
        "omni": image | {"siglip_feat_dim": 10, "n_refiner_layers": 2},
        "two patch sizes": image | {"all_patch_size": [1, 2], "all_f_patch_size": [1, 3]},
    }
