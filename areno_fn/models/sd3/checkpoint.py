"""Stable Diffusion 3 in a file."""

from __future__ import annotations

from collections.abc import Iterator

from areno_fn.models.flow_checkpoint import Leaf, columns, linear, read, rows, table, tensor
from areno_fn.models.sd3 import SD3Config

# fmt: off
OUTSIDE = table(
    tensor("pos_embed.pos_embed",                        "1", "grid*grid", "width", when="grid", buffer=True),
    tensor("pos_embed.proj.weight",                      "width", "in", "patch", "patch"),
    tensor("pos_embed.proj.bias",                        "width"),
    linear("time_text_embed.timestep_embedder.linear_1", "width", "256"),
    linear("time_text_embed.timestep_embedder.linear_2", "width", "width"),
    linear("time_text_embed.text_embedder.linear_1",     "width", "pooled"),
    linear("time_text_embed.text_embedder.linear_2",     "width", "width"),
    linear("context_embedder",                           "width", "text"),
    linear("norm_out.linear",                            "2*width", "width"),
    linear("proj_out",                                   "patch*patch*out", "width"),
)
BLOCK = table(
    linear("norm1.linear",             "6*width", "width", when="!dual"),
    linear("norm1.linear",             "9*width", "width", when="dual"),
    linear("norm1_context.linear",     "6*width", "width", when="!last"),
    linear("norm1_context.linear",     "2*width", "width", when="last"),
    linear("attn.to_q",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_k",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_v",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_out.0",            "width", "width",   cut=columns("width/heads")),
    linear("attn.add_q_proj",          "width", "width",   cut=rows("width/heads")),
    linear("attn.add_k_proj",          "width", "width",   cut=rows("width/heads")),
    linear("attn.add_v_proj",          "width", "width",   cut=rows("width/heads")),
    linear("attn.to_add_out",          "width", "width",   cut=columns("width/heads"), when="!last"),
    tensor("attn.norm_q.weight",       "head",             when="qk_norm"),
    tensor("attn.norm_k.weight",       "head",             when="qk_norm"),
    tensor("attn.norm_added_q.weight", "head",             when="qk_norm"),
    tensor("attn.norm_added_k.weight", "head",             when="qk_norm"),
    linear("attn2.to_q",               "width", "width",   cut=rows("width/heads"), when="dual"),
    linear("attn2.to_k",               "width", "width",   cut=rows("width/heads"), when="dual"),
    linear("attn2.to_v",               "width", "width",   cut=rows("width/heads"), when="dual"),
    linear("attn2.to_out.0",           "width", "width",   cut=columns("width/heads"), when="dual"),
    tensor("attn2.norm_q.weight",      "head",             when="qk_norm dual"),
    tensor("attn2.norm_k.weight",      "head",             when="qk_norm dual"),
    linear("ff.net.0.proj",            "4*width", "width", cut=rows("4*width")),
    linear("ff.net.2",                 "width", "4*width", cut=columns("4*width")),
    linear("ff_context.net.0.proj",    "4*width", "width", cut=rows("4*width"), when="!last"),
    linear("ff_context.net.2",         "width", "4*width", cut=columns("4*width"), when="!last"),
)
# fmt: on


def leaves(config: SD3Config) -> dict[str, Leaf]:
    """Every tensor of the state dict."""
    sizes = {
        "width": config.width,
        "heads": config.num_heads,
        "head": config.head_dim,
        "patch": config.patch_size,
        "in": config.in_channels,
        "out": config.out_channels,
        "text": config.joint_attention_dim,
        "pooled": config.pooled_projection_dim,
        "grid": config.pos_embed_max_size,
    }
    made = read(OUTSIDE, sizes, {"grid"} if config.pos_embed_max_size else ())
    for number in range(config.num_layers):
        made |= read(BLOCK, sizes, _flags(config, number), f"transformer_blocks.{number}.")
    return made


def _flags(config: SD3Config, number: int) -> Iterator[str]:
    if config.qk_norm:
        yield "qk_norm"
    if number in config.dual_attention_layers:
        yield "dual"
    if number == config.num_layers - 1:
        yield "last"
