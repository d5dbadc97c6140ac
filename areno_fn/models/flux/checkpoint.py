"""Flux.1 in a file."""

from __future__ import annotations

from areno_fn.models.flow_checkpoint import Leaf, columns, linear, read, repeat, rows, table, tensor
from areno_fn.models.flux import FluxConfig

# fmt: off
OUTSIDE = table(
    linear("time_text_embed.timestep_embedder.linear_1", "width", "256"),
    linear("time_text_embed.timestep_embedder.linear_2", "width", "width"),
    linear("time_text_embed.guidance_embedder.linear_1", "width", "256",   when="guidance"),
    linear("time_text_embed.guidance_embedder.linear_2", "width", "width", when="guidance"),
    linear("time_text_embed.text_embedder.linear_1",     "width", "pooled"),
    linear("time_text_embed.text_embedder.linear_2",     "width", "width"),
    linear("context_embedder",                           "width", "text"),
    linear("x_embedder",                                 "width", "in"),
    linear("norm_out.linear",                            "2*width", "width"),
    linear("proj_out",                                   "patch*patch*out", "width"),
)
DOUBLE = table(
    linear("norm1.linear",             "6*width", "width"),
    linear("norm1_context.linear",     "6*width", "width"),
    linear("attn.to_q",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_k",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_v",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_out.0",            "width", "width",   cut=columns("width/heads")),
    linear("attn.add_q_proj",          "width", "width",   cut=rows("width/heads")),
    linear("attn.add_k_proj",          "width", "width",   cut=rows("width/heads")),
    linear("attn.add_v_proj",          "width", "width",   cut=rows("width/heads")),
    linear("attn.to_add_out",          "width", "width",   cut=columns("width/heads")),
    tensor("attn.norm_q.weight",       "head"),
    tensor("attn.norm_k.weight",       "head"),
    tensor("attn.norm_added_q.weight", "head"),
    tensor("attn.norm_added_k.weight", "head"),
    linear("ff.net.0.proj",            "4*width", "width", cut=rows("4*width")),
    linear("ff.net.2",                 "width", "4*width", cut=columns("4*width")),
    linear("ff_context.net.0.proj",    "4*width", "width", cut=rows("4*width")),
    linear("ff_context.net.2",         "width", "4*width", cut=columns("4*width")),
)
SINGLE = table(  # attention and the two-layer network side by side: the last layer reads the outputs of both
    linear("norm.linear",              "3*width", "width"),
    linear("attn.to_q",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_k",                "width", "width",   cut=rows("width/heads")),
    linear("attn.to_v",                "width", "width",   cut=rows("width/heads")),
    tensor("attn.norm_q.weight",       "head"),
    tensor("attn.norm_k.weight",       "head"),
    linear("proj_mlp",                 "4*width", "width", cut=rows("4*width")),
    linear("proj_out",                 "width", "5*width", cut=columns("width/heads", "4*width")),
)
# fmt: on


def leaves(config: FluxConfig) -> dict[str, Leaf]:
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
    }
    made = read(OUTSIDE, sizes, {"guidance"} if config.guidance_embeds else ())
    made |= repeat(DOUBLE, sizes, "transformer_blocks", config.num_layers)
    made |= repeat(SINGLE, sizes, "single_transformer_blocks", config.num_single_layers)
    return made
