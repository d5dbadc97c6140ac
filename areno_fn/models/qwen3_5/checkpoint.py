"""qwen3_5 and qwen3_5_moe in a file: the names of Hugging Face, and the leaves they become."""

from __future__ import annotations

from collections.abc import Collection

from areno_fn.models.qwen3_5.config import FULL, LINEAR, Qwen35Shape
from areno_fn.models.table import HEAD, Section, Size, Table, channels, chosen, dealt, experts, prefix, row

EMBED = "embed_tokens.weight"
FLAT, NESTED = "model.", "model.language_model."
LEFT_OUT = ("model.visual.*", "mtp.*")
"""The vision tower, and the head that predicts further tokens."""

# fmt: off
ATTENTION = {
    #   leaf         place     columns   names in the file, in the order in which they are laid, each with its rows
    FULL: (
        dealt("self_attn.q_proj.weight", "heads", "hidden", "query q", "gate q"),
        row("qkv",       "column", "hidden", "self_attn.q_proj.weight/query q", "self_attn.k_proj.weight kv",
            "self_attn.v_proj.weight kv"),
        row("gate",      "column", "hidden", "self_attn.q_proj.weight/gate q"),
        dealt("self_attn.q_proj.bias", "heads", "", "query q", "gate q", when="bias"),
        row("qkv_bias",  "column", "",       "self_attn.q_proj.bias/query q", "self_attn.k_proj.bias kv",
            "self_attn.v_proj.bias kv", when="bias"),
        row("gate_bias", "column", "",       "self_attn.q_proj.bias/gate q", when="bias"),
        row("q_norm",    "",       "",       "self_attn.q_norm.weight head"),
        row("k_norm",    "",       "",       "self_attn.k_norm.weight head"),
        row("o",         "row",    "q",      "self_attn.o_proj.weight hidden"),
        row("o_bias",    "",       "",       "self_attn.o_proj.bias hidden", when="bias"),
    ),
    LINEAR: (
        row("qkvz",      "column", "hidden", "linear_attn.in_proj_qkv.weight lk+lk+lv", "linear_attn.in_proj_z.weight lv"),
        row("ba",        "column", "hidden", "linear_attn.in_proj_b.weight lheads", "linear_attn.in_proj_a.weight lheads"),
        channels("conv", "column", "taps",   "linear_attn.conv1d.weight lk+lk+lv"),
        row("dt_bias",   "column", "",       "linear_attn.dt_bias lheads"),
        row("A_log",     "column", "",       "linear_attn.A_log lheads"),
        row("gdn_norm",  "",       "",       "linear_attn.norm.weight lhead"),
        row("out",       "row",    "lv",     "linear_attn.out_proj.weight hidden"),
    ),
}
NORMS = (
    row("attn_norm",     "",       "",       "input_layernorm.weight hidden"),
    row("mlp_norm",      "",       "",       "post_attention_layernorm.weight hidden"),
)
DENSE = (
    row("gate_up",       "column", "hidden", "mlp.gate_proj.weight inner", "mlp.up_proj.weight inner"),
    row("down",          "row",    "inner",  "mlp.down_proj.weight hidden"),
)
EXPERTS = (
    row("router",             "",       "hidden", "mlp.gate.weight experts"),
    experts("expert_gate_up", "column", "hidden", "mlp.experts.{e}.gate_proj.weight moe", "mlp.experts.{e}.up_proj.weight moe",
            packed="mlp.experts.gate_up_proj"),
    experts("expert_down",    "row",    "moe",    "mlp.experts.{e}.down_proj.weight hidden", packed="mlp.experts.down_proj"),
    row("shared_gate_up",     "column", "hidden", "mlp.shared_expert.gate_proj.weight shared",
        "mlp.shared_expert.up_proj.weight shared"),
    row("shared_down",        "row",    "shared", "mlp.shared_expert.down_proj.weight hidden"),
    row("shared_gate",        "",       "hidden", "mlp.shared_expert_gate.weight one"),
)
END = (
    row("norm",          "",       "",       "norm.weight hidden"),
)
# fmt: on


def table(config: Qwen35Shape, names: Collection[str] | None = None) -> Table:
    """The table of a model.

    Args:
        config: the model.
        names: the tensors in the file; those that transformers writes, when None.

    Raises:
        LayoutError: the file has no embedding of the text model, or two.
    """
    names = _written(config) if names is None else names
    before = prefix(names, EMBED, (FLAT, NESTED))
    size = sizes(config)
    block = EXPERTS if config.num_experts else DENSE
    layers = (
        Section(f"{before}layers.{i}.", f"layers.{i}.", chosen(config, (*NORMS, *ATTENTION[kind], *block)), size)
        for i, kind in enumerate(config.layer_types)
    )
    ends = Section(before, "", END, size)
    shape = (config.vocab_size, config.hidden_size)
    return Table((ends, *layers), before + EMBED, shape, names, config.tie_embeddings)


def sizes(config: Qwen35Shape) -> dict[str, Size | int]:
    """The sizes that the table names."""
    keys, values = config.linear_key_heads, config.linear_value_heads
    return {
        "one": 1,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "q": Size(config.num_heads * config.head_dim, config.num_heads),
        "kv": Size(config.num_kv_heads * config.head_dim, config.num_kv_heads, copied=True),
        "head": config.head_dim,
        "inner": config.intermediate_size,
        "lk": Size(keys * config.linear_key_dim, keys, copied=True),
        "lv": Size(values * config.linear_value_dim, values),
        "lheads": Size(values, values),
        "lhead": config.linear_value_dim,
        "taps": config.conv_width,
        "moe": config.moe_intermediate_size,
        "shared": config.shared_intermediate_size,
        "experts": config.num_experts,
    }


def _written(config: Qwen35Shape) -> frozenset[str]:
    embed = (NESTED if config.nested else FLAT) + EMBED
    return frozenset([embed] if config.tie_embeddings else [embed, HEAD])
