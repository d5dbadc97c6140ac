"""Configurations of flow-matching transformers: random small ones, and those that were published, with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from hypothesis import strategies as st

from areno_fn.models.flow_layouts import FLOW_LAYOUTS

Draw = Callable[..., Any]
VARIANTS = [(family, variant) for family, layouts in FLOW_LAYOUTS.items() for variant in layouts.tiny()]


def tiny(family: str, variant: str) -> Mapping[str, Any]:
    return FLOW_LAYOUTS[family].tiny()[variant]


# -------------------------------------------------------------------------------------------------- random

counts = st.integers(1, 3)
layers = st.integers(1, 2)
head_counts = st.sampled_from((1, 2, 3, 4, 8))
channels = st.integers(1, 9)
flags = st.booleans()
optional = st.none() | channels


def _fields(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(strategies)


@st.composite
def _sd3(draw: Draw) -> dict[str, Any]:
    heads, head, number = draw(head_counts), 4 * draw(counts), draw(counts)
    dual = st.lists(st.integers(0, number - 1), unique=True)
    return {
        "num_attention_heads": heads, "attention_head_dim": head, "caption_projection_dim": heads * head,
        "num_layers": number, "dual_attention_layers": draw(dual), "qk_norm": draw(st.sampled_from((None, "rms_norm"))),
        "sample_size": 8,
    } | draw(_fields(
        patch_size=counts, in_channels=channels, out_channels=optional, joint_attention_dim=channels,
        pooled_projection_dim=channels, pos_embed_max_size=st.none() | st.integers(2, 5),
    ))  # fmt: skip


@st.composite
def _z_image(draw: Draw) -> dict[str, Any]:
    heads, head = draw(head_counts), 2 * draw(st.integers(3, 18))  # a width of more than 256 has a time of 256 channels
    sides = draw(st.lists(counts, min_size=1, max_size=3, unique=True))
    frames = draw(st.lists(counts, min_size=len(sides), max_size=len(sides)))
    return {
        "dim": heads * head, "n_heads": heads, "n_kv_heads": heads, "axes_dims": [2, 2, head - 4],
        "axes_lens": [4, 4, 4], "all_patch_size": sides, "all_f_patch_size": frames,
    } | draw(_fields(
        n_layers=layers, n_refiner_layers=st.integers(0, 2), in_channels=channels, cap_feat_dim=channels,
        siglip_feat_dim=optional, qk_norm=flags,
    ))  # fmt: skip


_flux = _fields(
    num_layers=st.integers(0, 2), num_single_layers=st.integers(0, 2), num_attention_heads=head_counts,
    attention_head_dim=channels, patch_size=counts, in_channels=channels, out_channels=optional,
    joint_attention_dim=channels, pooled_projection_dim=channels, guidance_embeds=flags,
)  # fmt: skip
_flux2 = _fields(
    num_layers=st.integers(0, 2), num_single_layers=st.integers(0, 2), num_attention_heads=head_counts,
    attention_head_dim=channels, patch_size=counts, in_channels=channels, out_channels=optional,
    joint_attention_dim=channels, timestep_guidance_channels=channels, guidance_embeds=flags,
    mlp_ratio=st.floats(1.0, 4.0),
)  # fmt: skip
_qwen_image = _fields(
    num_layers=layers, num_attention_heads=head_counts, attention_head_dim=channels, patch_size=counts,
    in_channels=channels, out_channels=optional, joint_attention_dim=channels, use_additional_t_cond=flags,
    zero_cond_t=flags, guidance_embeds=flags,
)  # fmt: skip
_wan = _fields(
    num_layers=layers, num_attention_heads=head_counts, attention_head_dim=st.sampled_from((6, 8, 12, 14)),
    ffn_dim=channels.map(lambda each: 24 * each), patch_size=st.lists(counts, min_size=3, max_size=3), in_channels=channels,
    out_channels=optional, text_dim=channels, freq_dim=channels, cross_attn_norm=flags, image_dim=optional,
    added_kv_proj_dim=optional, pos_embed_seq_len=optional, rope_max_seq_len=st.just(4),
)  # fmt: skip
_ltx2 = _fields(
    num_layers=layers, caption_channels=channels, attention_bias=flags, attention_out_bias=flags,
    norm_elementwise_affine=flags, use_prompt_embeddings=flags, use_prompt_adaln_single=flags,
    use_keyframes_abs_pos_embedding=flags, perturbed_attn=flags,
    **{
        prefix + name: strategy
        for prefix in ("", "audio_")
        for name, strategy in {
            "num_attention_heads": head_counts, "attention_head_dim": channels, "in_channels": channels,
            "out_channels": optional, "cross_attention_dim": channels, "gated_attn": flags, "cross_attn_mod": flags,
            "ff_bias": flags,
        }.items()
    },
)  # fmt: skip
_BY_FAMILY: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "sd3": _sd3(), "flux": _flux, "flux2": _flux2, "qwen_image": _qwen_image, "z_image": _z_image(), "wan": _wan,
    "ltx2": _ltx2,
}  # fmt: skip


def configs(family: str) -> st.SearchStrategy[dict[str, Any]]:
    """What config.json of a small transformer may hold, some fields left to their defaults where those are small."""
    return _BY_FAMILY[family].map(lambda fields: {"_class_name": FLOW_LAYOUTS[family].name, **fields})


# ----------------------------------------------------------------------------------------------- published


@attrs.frozen
class Published:
    """A transformer that was published.

    Attributes:
        family: of its layout.
        config: what its config.json says, without fields at their defaults.
        billions: of parameters, rounded as its publisher rounds them.
        exactly: the number of elements in its files, where that is known.
    """

    family: str
    config: Mapping[str, Any]
    billions: str
    exactly: int | None = None

    @property
    def hf(self) -> dict[str, Any]:
        return {"_class_name": FLOW_LAYOUTS[self.family].name, **self.config}


_SD3: dict[str, Any] = {
    "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "in_channels": 16, "out_channels": 16, "patch_size": 2,
    "sample_size": 128,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "attention_head_dim": 128,
    "in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "patch_size": 1,
}  # fmt: skip
_FLUX2: dict[str, Any] = {"attention_head_dim": 128, "in_channels": 128, "mlp_ratio": 3.0, "patch_size": 1}
_QWEN: dict[str, Any] = {
    "num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "in_channels": 64, "out_channels": 16,
    "joint_attention_dim": 3584, "patch_size": 2, "guidance_embeds": False, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
_WAN: dict[str, Any] = {
    "num_layers": 40, "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "in_channels": 16,
    "out_channels": 16, "patch_size": [1, 2, 2], "text_dim": 4096, "freq_dim": 256, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "image_dim": None, "added_kv_proj_dim": None,
}  # fmt: skip
_Z_IMAGE: dict[str, Any] = {
    "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "qk_norm": True,
    "cap_feat_dim": 2560, "in_channels": 16, "all_patch_size": [2], "all_f_patch_size": [1],
    "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "norm_eps": 1e-5, "rope_theta": 256.0, "t_scale": 1000.0,
}  # fmt: skip
_LTX2: dict[str, Any] = {
    "num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096,
    "in_channels": 128, "out_channels": 128, "audio_num_attention_heads": 32, "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048, "audio_in_channels": 128, "audio_out_channels": 128, "caption_channels": 3840,
}  # fmt: skip

_GATED = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
_IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

PUBLISHED = {
    "Stable Diffusion 3 medium": Published("sd3", _SD3 | {"pos_embed_max_size": 192}, "2.03"),
    "Stable Diffusion 3.5 medium": Published(
        "sd3",
        _SD3 | {"pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13))},
        "2.24",
    ),
    "Stable Diffusion 3.5 large": Published(
        "sd3",
        _SD3
        | {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432}
        | {"pos_embed_max_size": 192, "qk_norm": "rms_norm", "dual_attention_layers": []},
        "8.06",
    ),
    "Flux.1 schnell": Published("flux", _FLUX | {"guidance_embeds": False}, "11.9"),
    "Flux.1 dev": Published("flux", _FLUX | {"guidance_embeds": True}, "11.9", 11_901_408_320),
    "Flux.1 Fill": Published("flux", _FLUX | {"guidance_embeds": True, "in_channels": 384, "out_channels": 64}, "11.9"),
    "Flux.2 dev": Published("flux2", _FLUX2, "32"),
    "Flux.2 Klein 4B": Published(
        "flux2",
        _FLUX2
        | {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24}
        | {"joint_attention_dim": 7680, "guidance_embeds": False},
        "4",
    ),
    "Flux.2 Klein 9B": Published(
        "flux2",
        _FLUX2
        | {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32}
        | {"joint_attention_dim": 12288, "guidance_embeds": False},
        "9",
    ),
    "Qwen-Image": Published("qwen_image", _QWEN | {"pooled_projection_dim": 768}, "20.4", 20_430_401_088),
    "Qwen-Image-Edit 2511": Published("qwen_image", _QWEN | {"zero_cond_t": True}, "20.4", 20_430_401_088),
    "Z-Image Turbo": Published("z_image", _Z_IMAGE, "6.15", 6_154_908_736),
    "Wan 2.1 text to video 14B": Published("wan", _WAN, "14.3", 14_288_491_584),
    "Wan 2.1 text to video 1.3B": Published(
        "wan", _WAN | {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}, "1.4", 1_418_996_800
    ),
    "Wan 2.1 image to video 14B": Published("wan", _WAN | _IMAGE, "16.4"),
    "Wan 2.1 first and last frame to video 14B": Published("wan", _WAN | _IMAGE | {"pos_embed_seq_len": 514}, "16.4"),
    "Wan 2.2 image to video A14B": Published("wan", _WAN | {"in_channels": 36}, "14.3"),
    "Wan 2.2 5B": Published(
        "wan",
        _WAN | {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        "5.0",
    ),
    "LTX-2": Published("ltx2", _LTX2 | {"rope_type": "split"}, "19"),
    "LTX-2.3": Published("ltx2", _LTX2 | _GATED | {"rope_type": "split", "use_prompt_embeddings": False}, "19"),
}
