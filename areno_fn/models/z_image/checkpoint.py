"""Z-Image in a file."""

from __future__ import annotations

from areno_fn.models.flow_checkpoint import Leaf, columns, linear, read, repeat, rows, table, tensor
from areno_fn.models.z_image import ZImageConfig

# fmt: off
OUTSIDE = table(
    tensor("x_pad_token",                     "1", "width"),
    tensor("cap_pad_token",                   "1", "width"),
    linear("t_embedder.mlp.0",                "1024", "256"),
    linear("t_embedder.mlp.2",                "time", "1024"),
    tensor("cap_embedder.0.weight",           "text"),
    linear("cap_embedder.1",                  "width", "text"),
    tensor("siglip_pad_token",                "1", "width",         when="siglip"),
    tensor("siglip_embedder.0.weight",        "siglip",             when="siglip"),
    linear("siglip_embedder.1",               "width", "siglip",    when="siglip"),
)
ENDS = table(  # for each size of a patch
    linear("all_x_embedder.{}",                    "width", "patch*in"),
    linear("all_final_layer.{}.linear",            "patch*in", "width"),
    linear("all_final_layer.{}.adaLN_modulation.1", "width", "time"),
)
BLOCK = table(
    linear("attention.to_q",          "width", "width", bias="never", cut=rows("width/heads")),
    linear("attention.to_k",          "width", "width", bias="never", cut=rows("width/heads")),
    linear("attention.to_v",          "width", "width", bias="never", cut=rows("width/heads")),
    linear("attention.to_out.0",      "width", "width", bias="never", cut=columns("width/heads")),
    tensor("attention.norm_q.weight", "head",           when="qk_norm"),
    tensor("attention.norm_k.weight", "head",           when="qk_norm"),
    linear("feed_forward.w1",         "inner", "width", bias="never", cut=rows("inner")),
    linear("feed_forward.w2",         "width", "inner", bias="never", cut=columns("inner")),
    linear("feed_forward.w3",         "inner", "width", bias="never", cut=rows("inner")),
    tensor("attention_norm1.weight",  "width"),
    tensor("attention_norm2.weight",  "width"),
    tensor("ffn_norm1.weight",        "width"),
    tensor("ffn_norm2.weight",        "width"),
    linear("adaLN_modulation.0",      "4*width", "time", when="modulated"),
)
# fmt: on


def leaves(config: ZImageConfig) -> dict[str, Leaf]:
    """Every tensor of the state dict."""
    sizes = {
        "width": config.width,
        "heads": config.num_heads,
        "head": config.head_dim,
        "inner": int(config.width / 3 * 8),
        "in": config.in_channels,
        "text": config.cap_feat_dim,
        "siglip": config.siglip_feat_dim,
        "time": min(config.width, 256),
    }
    norm = {"qk_norm"} if config.qk_norm else set()
    refiners = {"noise_refiner": norm | {"modulated"}, "context_refiner": norm}
    if config.siglip_feat_dim:
        refiners["siglip_refiner"] = norm
    made = read(OUTSIDE, sizes, {"siglip"} if config.siglip_feat_dim else ())
    for side, frames in config.patches:
        ends = read(ENDS, sizes | {"patch": side * side * frames})
        made |= {name.format(f"{side}-{frames}"): leaf for name, leaf in ends.items()}
    made |= repeat(BLOCK, sizes, "layers", config.num_layers, norm | {"modulated"})
    for refiner, flags in refiners.items():
        made |= repeat(BLOCK, sizes, refiner, config.num_refiner_layers, flags)
    return made
