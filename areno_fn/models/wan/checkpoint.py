"""Wan in a file."""

from __future__ import annotations

from areno_fn.models.flow_checkpoint import Leaf, columns, linear, read, repeat, rows, table, tensor
from areno_fn.models.wan import WanConfig

# fmt: off
OUTSIDE = table(
    tensor("scale_shift_table",                            "1", "2", "width"),
    tensor("patch_embedding.weight",                       "width", "in", "frames", "rows", "columns"),
    tensor("patch_embedding.bias",                         "width"),
    linear("condition_embedder.time_embedder.linear_1",    "width", "wave"),
    linear("condition_embedder.time_embedder.linear_2",    "width", "width"),
    linear("condition_embedder.time_proj",                 "6*width", "width"),
    linear("condition_embedder.text_embedder.linear_1",    "width", "text"),
    linear("condition_embedder.text_embedder.linear_2",    "width", "width"),
    tensor("condition_embedder.image_embedder.pos_embed",  "1", "positions", "image", when="image positions"),
    tensor("condition_embedder.image_embedder.norm1.weight",    "image",          when="image"),
    tensor("condition_embedder.image_embedder.norm1.bias",      "image",          when="image"),
    linear("condition_embedder.image_embedder.ff.net.0.proj",   "image", "image", when="image"),
    linear("condition_embedder.image_embedder.ff.net.2",        "width", "image", when="image"),
    tensor("condition_embedder.image_embedder.norm2.weight",    "width",          when="image"),
    tensor("condition_embedder.image_embedder.norm2.bias",      "width",          when="image"),
    linear("proj_out",                                     "frames*rows*columns*out", "width"),
)
BLOCK = table(  # queries and keys are normalised over all heads, so those weights go with the heads
    tensor("scale_shift_table",         "1", "6", "width"),
    linear("attn1.to_q",                "width", "width", cut=rows("width/heads")),
    linear("attn1.to_k",                "width", "width", cut=rows("width/heads")),
    linear("attn1.to_v",                "width", "width", cut=rows("width/heads")),
    linear("attn1.to_out.0",            "width", "width", cut=columns("width/heads")),
    tensor("attn1.norm_q.weight",       "width",          cut=rows("width/heads")),
    tensor("attn1.norm_k.weight",       "width",          cut=rows("width/heads")),
    tensor("norm2.weight",              "width",          when="cross_norm"),
    tensor("norm2.bias",                "width",          when="cross_norm"),
    linear("attn2.to_q",                "width", "width", cut=rows("width/heads")),
    linear("attn2.to_k",                "width", "width", cut=rows("width/heads")),
    linear("attn2.to_v",                "width", "width", cut=rows("width/heads")),
    linear("attn2.to_out.0",            "width", "width", cut=columns("width/heads")),
    tensor("attn2.norm_q.weight",       "width",          cut=rows("width/heads")),
    tensor("attn2.norm_k.weight",       "width",          cut=rows("width/heads")),
    linear("attn2.add_k_proj",          "width", "added", cut=rows("width/heads"), when="added"),
    linear("attn2.add_v_proj",          "width", "added", cut=rows("width/heads"), when="added"),
    tensor("attn2.norm_added_k.weight", "width",          cut=rows("width/heads"), when="added"),
    linear("ffn.net.0.proj",            "inner", "width", cut=rows("inner")),
    linear("ffn.net.2",                 "width", "inner", cut=columns("inner")),
)
# fmt: on
LEFT_OUT = ("blocks.*.attn2.norm_added_q.weight",)
"""Files of older versions may have a norm of queries to images, which nothing reads."""


def leaves(config: WanConfig) -> dict[str, Leaf]:
    """Every tensor of the state dict."""
    frames, height, width = config.patch_size
    sizes = {
        "width": config.width,
        "heads": config.num_heads,
        "inner": config.inner,
        "frames": frames,
        "rows": height,
        "columns": width,
        "in": config.in_channels,
        "out": config.out_channels,
        "text": config.text_dim,
        "wave": config.freq_dim,
        "image": config.image_dim,
        "positions": config.image_positions,
        "added": config.added_kv_dim,
    }
    flags = {name for name in ("image", "positions", "added") if sizes[name]}
    if config.cross_attn_norm:
        flags.add("cross_norm")
    return read(OUTSIDE, sizes, flags) | repeat(BLOCK, sizes, "blocks", config.num_layers, flags)
