"""qwen3_moe in a file: the names of Hugging Face, and the leaves they become."""

from __future__ import annotations

from collections.abc import Collection

from areno_fn.models.qwen3_moe.config import Qwen3MoeShape
from areno_fn.models.table import HEAD, Section, Size, Table, chosen, experts, row

EMBED = "model.embed_tokens.weight"

# fmt: off
ATTENTION = (
    #   leaf         place     columns   names in the file, in the order in which they are laid, each with its rows
    row("attn_norm", "",       "",       "input_layernorm.weight hidden"),
    row("qkv",       "column", "hidden", "self_attn.q_proj.weight q", "self_attn.k_proj.weight kv", "self_attn.v_proj.weight kv"),
    row("qkv_bias",  "column", "",       "self_attn.q_proj.bias q", "self_attn.k_proj.bias kv", "self_attn.v_proj.bias kv",
        when="bias"),
    row("q_norm",    "",       "",       "self_attn.q_norm.weight head"),
    row("k_norm",    "",       "",       "self_attn.k_norm.weight head"),
    row("o",         "row",    "q",      "self_attn.o_proj.weight hidden"),
    row("o_bias",    "",       "",       "self_attn.o_proj.bias hidden", when="bias"),
    row("mlp_norm",  "",       "",       "post_attention_layernorm.weight hidden"),
)
DENSE = (
    row("gate_up",   "column", "hidden", "mlp.gate_proj.weight inner", "mlp.up_proj.weight inner"),
    row("down",      "row",    "inner",  "mlp.down_proj.weight hidden"),
)
EXPERTS = (
    row("router",            "",       "hidden", "mlp.gate.weight experts"),
    experts("expert_gate_up", "column", "hidden", "mlp.experts.{e}.gate_proj.weight moe", "mlp.experts.{e}.up_proj.weight moe",
            packed="mlp.experts.gate_up_proj"),
    experts("expert_down",    "row",    "moe",    "mlp.experts.{e}.down_proj.weight hidden", packed="mlp.experts.down_proj"),
)
END = (
    row("norm",      "",       "",       "norm.weight hidden"),
)
# fmt: on


def table(config: Qwen3MoeShape, names: Collection[str] | None = None) -> Table:
    """The table of a model.

    Args:
        config: the model.
        names: the tensors in the file; those that transformers writes, when None.
    """
    names = _written(config) if names is None else names
    size = sizes(config)
    blocks = (DENSE if dense else EXPERTS for dense in config.dense_layers)
    layers = (
        Section(f"model.layers.{i}.", f"layers.{i}.", chosen(config, (*ATTENTION, *block)), size)
        for i, block in enumerate(blocks)
    )
    ends = Section("model.", "", END, size)
    return Table((ends, *layers), EMBED, (config.vocab_size, config.hidden_size), names, config.tie_embeddings)


def sizes(config: Qwen3MoeShape) -> dict[str, Size | int]:
    """The sizes that the table names."""
    return {
        "hidden": config.hidden_size,
        "q": Size(config.num_heads * config.head_dim, config.num_heads),
        "kv": Size(config.num_kv_heads * config.head_dim, config.num_kv_heads, copied=True),
        "head": config.head_dim,
        "inner": config.intermediate_size,
        "moe": config.moe_intermediate_size,
        "experts": config.num_experts,
    }


def _written(config: Qwen3MoeShape) -> frozenset[str]:
    return frozenset([EMBED] if config.tie_embeddings else [EMBED, HEAD])
