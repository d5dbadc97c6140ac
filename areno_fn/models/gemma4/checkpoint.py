"""gemma4 in a file: the names of Hugging Face, and the leaves they become."""

from __future__ import annotations

from collections.abc import Collection

from areno_fn.models.gemma4.config import Gemma4Layer, Gemma4Shape
from areno_fn.models.table import HEAD, Dealt, Row, Section, Size, Table, chosen, packed, prefix, row

EMBED = "embed_tokens.weight"
FLAT, NESTED = "model.", "model.language_model."
OTHERS = ("model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*")
SHARED = ("k_proj.*", "v_proj.*", "k_norm.*", "v_norm.*")

# fmt: off
QKV = (
    #   leaf             place     columns   names in the file, in the order in which they are laid, each with its rows
    row("qkv",           "column", "hidden", "self_attn.q_proj.weight q", "self_attn.k_proj.weight kv",
        "self_attn.v_proj.weight kv"),
    row("qkv_bias",      "column", "",       "self_attn.q_proj.bias q", "self_attn.k_proj.bias kv", "self_attn.v_proj.bias kv",
        when="bias"),
    row("k_norm",        "",       "",       "self_attn.k_norm.weight head"),
)
# One matrix gives keys and values: it is one leaf, so that training keeps both.
QK = (
    row("qk",            "column", "hidden", "self_attn.q_proj.weight q", "self_attn.k_proj.weight kv"),
    row("qk_bias",       "column", "",       "self_attn.q_proj.bias q", "self_attn.k_proj.bias kv", when="bias"),
    row("k_norm",        "",       "",       "self_attn.k_norm.weight head"),
)
# Keys and values are those of an earlier layer.
Q = (
    row("q",             "column", "hidden", "self_attn.q_proj.weight q"),
    row("q_bias",        "column", "",       "self_attn.q_proj.bias q", when="bias"),
)
LAYER = (
    row("attn_norm",     "",       "",       "input_layernorm.weight hidden"),
    row("q_norm",        "",       "",       "self_attn.q_norm.weight head"),
    row("o",             "row",    "q",      "self_attn.o_proj.weight hidden"),
    row("o_bias",        "",       "",       "self_attn.o_proj.bias hidden", when="bias"),
    row("attn_out_norm", "",       "",       "post_attention_layernorm.weight hidden"),
    row("mlp_norm",      "",       "",       "pre_feedforward_layernorm.weight hidden"),
    row("gate_up",       "column", "hidden", "mlp.gate_proj.weight inner", "mlp.up_proj.weight inner"),
    row("down",          "row",    "inner",  "mlp.down_proj.weight hidden"),
    row("mlp_out_norm",  "",       "",       "post_feedforward_layernorm.weight hidden"),
    row("scalar",        "",       "",       "layer_scalar one"),
    row("input_gate",    "",       "hidden", "per_layer_input_gate.weight ple", when="per_layer"),
    row("input_out",     "",       "ple",    "per_layer_projection.weight hidden", when="per_layer"),
    row("input_norm",    "",       "",       "post_per_layer_input_norm.weight hidden", when="per_layer"),
    row("router",        "",       "hidden", "router.proj.weight experts", when="moe"),
    row("router_scale",  "",       "",       "router.scale hidden", when="moe"),
    row("expert_scale",  "",       "",       "router.per_expert_scale experts", when="moe"),
    packed("expert_gate_up", "column", "hidden", "experts.gate_up_proj moe+moe", when="moe"),
    packed("expert_down", "row", "moe",      "experts.down_proj hidden", when="moe"),
    row("dense_out_norm", "",      "",       "post_feedforward_layernorm_1.weight hidden", when="moe"),
    row("expert_norm",   "",       "",       "pre_feedforward_layernorm_2.weight hidden", when="moe"),
    row("expert_out_norm", "",     "",       "post_feedforward_layernorm_2.weight hidden", when="moe"),
)
END = (
    row("norm",          "",       "",       "norm.weight hidden"),
    row("layer_embed",   "vocab",  "ples",   "embed_tokens_per_layer.weight ple_vocab", when="per_layer"),
    row("layer_inputs",  "",       "hidden", "per_layer_model_projection.weight ples", when="per_layer"),
    row("layer_norm",    "",       "",       "per_layer_projection_norm.weight ple", when="per_layer"),
)
# fmt: on


def table(config: Gemma4Shape, names: Collection[str] | None = None) -> Table:
    """The table of a model.

    Args:
        config: the model.
        names: the tensors in the file; those that transformers writes, when None.

    Raises:
        LayoutError: the file has no embedding of the text model, or two.
    """
    names = _written(config) if names is None else names
    before = prefix(names, EMBED, (FLAT, NESTED))
    layers = (
        Section(f"{before}layers.{i}.", f"layers.{i}.", chosen(config, (*LAYER, *_keys(layer))), sizes(config, layer))
        for i, layer in enumerate(config.layers)
    )
    ends = Section(before, "", chosen(config, END), sizes(config, config.layers[-1]))
    shape = (config.vocab_size, config.hidden_size)
    return Table((ends, *layers), before + EMBED, shape, names, config.tie_embeddings)


def left_out(config: Gemma4Shape) -> tuple[str, ...]:
    """Patterns of the tensors that are no part of the text model.

    Besides what sees and hears, these are keys and values of layers that read those of another layer: a file may
    hold some, but nothing depends on them.
    """
    unused = [number for number, layer in enumerate(config.layers) if not layer.keys]
    return OTHERS + tuple(f"*.layers.{i}.self_attn.{name}" for i in unused for name in SHARED)


def sizes(config: Gemma4Shape, layer: Gemma4Layer) -> dict[str, Size | int]:
    """The sizes that the table names, in one layer."""
    return {
        "one": 1,
        "hidden": config.hidden_size,
        "q": Size(config.num_heads * layer.head_dim, config.num_heads),
        "kv": Size(layer.num_kv_heads * layer.head_dim, layer.num_kv_heads, copied=True),
        "head": layer.head_dim,
        "inner": layer.intermediate_size,
        "ple": config.per_layer_size,
        "ples": config.per_layer_size * len(config.layers),
        "ple_vocab": config.per_layer_vocab,
        "moe": config.moe_intermediate_size,
        "experts": config.num_experts,
    }


def _keys(layer: Gemma4Layer) -> tuple[Row | Dealt, ...]:
    if layer.values:
        return QKV
    return QK if layer.keys else Q


def _written(config: Gemma4Shape) -> frozenset[str]:
    embed = (NESTED if config.nested else FLAT) + EMBED
    return frozenset([embed] if config.tie_embeddings else [embed, HEAD])
