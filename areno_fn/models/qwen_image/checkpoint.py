"""Qwen-Image in a file."""

from __future__ import annotations

from areno_fn.models.flow_checkpoint import Leaf, columns, linear, read, repeat, rows, table, tensor
from areno_fn.models.qwen_image import QwenImageConfig

# fmt: off
OUTSIDE = table(
    linear("time_text_embed.timestep_embedder.linear_1",     "width", "256"),
    linear("time_text_embed.timestep_embedder.linear_2",     "width", "width"),
    tensor("time_text_embed.addition_t_embedding.weight",    "2", "width", when="addition"),
    tensor("txt_norm.weight",                                "text"),
    linear("img_in",                                         "width", "in"),
    linear("txt_in",                                         "width", "text"),
    linear("norm_out.linear",                                "2*width", "width"),
    linear("proj_out",                                       "patch*patch*out", "width"),
)
BLOCK = table(
    linear("img_mod.1",                "6*width", "width"),
    linear("txt_mod.1",                "6*width", "width"),
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
    linear("img_mlp.net.0.proj",       "4*width", "width", cut=rows("4*width")),
    linear("img_mlp.net.2",            "width", "4*width", cut=columns("4*width")),
    linear("txt_mlp.net.0.proj",       "4*width", "width", cut=rows("4*width")),
    linear("txt_mlp.net.2",            "width", "4*width", cut=columns("4*width")),
)
# fmt: on


def leaves(config: QwenImageConfig) -> dict[str, Leaf]:
    """Every tensor of the state dict."""
    sizes = {
        "width": config.width,
        "heads": config.num_heads,
        "head": config.head_dim,
        "patch": config.patch_size,
        "in": config.in_channels,
        "out": config.out_channels,
        "text": config.joint_attention_dim,
    }
    made = read(OUTSIDE, sizes, {"addition"} if config.use_additional_t_cond else ())
    return made | repeat(BLOCK, sizes, "transformer_blocks", config.num_layers)
