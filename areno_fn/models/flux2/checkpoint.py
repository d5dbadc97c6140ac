"""Flux.2 in a file."""

from __future__ import annotations

from areno_fn.models.flow_checkpoint import Leaf, columns, linear, read, repeat, rows, table, tensor
from areno_fn.models.flux2 import Flux2Config

# fmt: off
OUTSIDE = table(
    linear("time_guidance_embed.timestep_embedder.linear_1", "width", "wave",    bias="never"),
    linear("time_guidance_embed.timestep_embedder.linear_2", "width", "width",   bias="never"),
    linear("time_guidance_embed.guidance_embedder.linear_1", "width", "wave",    bias="never", when="guidance"),
    linear("time_guidance_embed.guidance_embedder.linear_2", "width", "width",   bias="never", when="guidance"),
    linear("double_stream_modulation_img.linear",            "6*width", "width", bias="never"),
    linear("double_stream_modulation_txt.linear",            "6*width", "width", bias="never"),
    linear("single_stream_modulation.linear",                "3*width", "width", bias="never"),
    linear("x_embedder",                                     "width", "in",      bias="never"),
    linear("context_embedder",                               "width", "text",    bias="never"),
    linear("norm_out.linear",                                "2*width", "width", bias="never"),
    linear("proj_out",                                       "patch*patch*out", "width", bias="never"),
)
DOUBLE = table(
    linear("attn.to_q",                "width", "width",   bias="never", cut=rows("width/heads")),
    linear("attn.to_k",                "width", "width",   bias="never", cut=rows("width/heads")),
    linear("attn.to_v",                "width", "width",   bias="never", cut=rows("width/heads")),
    linear("attn.to_out.0",            "width", "width",   bias="never", cut=columns("width/heads")),
    linear("attn.add_q_proj",          "width", "width",   bias="never", cut=rows("width/heads")),
    linear("attn.add_k_proj",          "width", "width",   bias="never", cut=rows("width/heads")),
    linear("attn.add_v_proj",          "width", "width",   bias="never", cut=rows("width/heads")),
    linear("attn.to_add_out",          "width", "width",   bias="never", cut=columns("width/heads")),
    tensor("attn.norm_q.weight",       "head"),
    tensor("attn.norm_k.weight",       "head"),
    tensor("attn.norm_added_q.weight", "head"),
    tensor("attn.norm_added_k.weight", "head"),
    linear("ff.linear_in",             "2*inner", "width", bias="never", cut=rows("inner", "inner")),
    linear("ff.linear_out",            "width", "inner",   bias="never", cut=columns("inner")),
    linear("ff_context.linear_in",     "2*inner", "width", bias="never", cut=rows("inner", "inner")),
    linear("ff_context.linear_out",    "width", "inner",   bias="never", cut=columns("inner")),
)
SINGLE = table(  # rows: q, k, v, then the two halves of the gated network; columns: attention, then the network
    linear("attn.to_qkv_mlp_proj",     "3*width+2*inner", "width", bias="never",
           cut=rows("width/heads", "width/heads", "width/heads", "inner", "inner")),
    linear("attn.to_out",              "width", "width+inner",     bias="never", cut=columns("width/heads", "inner")),
    tensor("attn.norm_q.weight",       "head"),
    tensor("attn.norm_k.weight",       "head"),
)
# fmt: on


def leaves(config: Flux2Config) -> dict[str, Leaf]:
    """Every tensor of the state dict."""
    sizes = {
        "width": config.width,
        "heads": config.num_heads,
        "head": config.head_dim,
        "inner": config.inner,
        "patch": config.patch_size,
        "in": config.in_channels,
        "out": config.out_channels,
        "text": config.joint_attention_dim,
        "wave": config.timestep_guidance_channels,
    }
    made = read(OUTSIDE, sizes, {"guidance"} if config.guidance_embeds else ())
    made |= repeat(DOUBLE, sizes, "transformer_blocks", config.num_layers)
    made |= repeat(SINGLE, sizes, "single_transformer_blocks", config.num_single_layers)
    return made
