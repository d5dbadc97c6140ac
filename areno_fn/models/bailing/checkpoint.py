"""bailing in a file: the names of Hugging Face, and the leaves they become."""

from __future__ import annotations

from collections.abc import Collection

from areno_fn.models.bailing.config import FULL, BailingShape
from areno_fn.models.table import HEAD, Dealt, Row, Section, Size, Table, channels, chosen, experts, prefix, row, word

# fmt: off
# Softmax attention through a latent.
LATENT = (
    #   leaf              place     columns   names in the file, in the order in which they are laid, each with its rows
    row("kv_a",           "",       "hidden", "{attn}.kv_a_proj_with_mqa.weight kv_a"),
    row("kv_a_norm",      "",       "",       "{attn}.kv_a_layernorm.weight kv_rank"),
    row("kv_b",           "column", "kv_rank", "{attn}.kv_b_proj.weight kv_b"),
    row("o",              "row",    "values", "{attn}.{dense}.weight hidden"),
)
QUERIES = (
    row("q",              "column", "hidden", "{attn}.q_proj.weight queries"),
)
LATENT_QUERIES = (
    row("q_a",            "",       "hidden", "{attn}.q_a_proj.weight q_rank"),
    row("q_a_norm",       "",       "",       "{attn}.q_a_layernorm.weight q_rank"),
    row("q_b",            "column", "q_rank", "{attn}.q_b_proj.weight queries"),
)
HEAD_GATE = (
    row("gate",           "column", "hidden", "{attn}.g_proj.weight heads"),
)
# Softmax attention with grouped queries.
GROUPED = (
    row("qkv",            "column", "hidden", "{attn}.query_key_value.weight q+kv+kv"),
    row("qkv_bias",       "column", "",       "{attn}.query_key_value.bias q+kv+kv", when="qkv_bias"),
    row("q_norm",         "",       "",       "{attn}.query_layernorm.weight head", when="qk_norm"),
    row("k_norm",         "",       "",       "{attn}.key_layernorm.weight head", when="qk_norm"),
    row("o",              "row",    "q",      "{attn}.{dense}.weight hidden"),
)
# Linear attention that decays at fixed rates.
DECAY = (
    row("qkv",            "column", "hidden", "{attn}.query_key_value.weight lq+lkv+lkv"),
    row("qkv_bias",       "column", "",       "{attn}.query_key_value.bias lq+lkv+lkv", when="qkv_bias"),
    row("q_norm",         "",       "",       "{attn}.query_layernorm.weight lhead", when="qk_norm"),
    row("k_norm",         "",       "",       "{attn}.key_layernorm.weight lhead", when="qk_norm"),
    row("gate",           "column", "hidden", "{attn}.g_proj.weight lq"),
    row("group_norm",     "column", "",       "{attn}.g_norm.weight lq"),
    row("o",              "row",    "lq",     "{attn}.{dense}.weight hidden"),
)
# Linear attention that is a delta net with a gate for every channel.
DELTA = (
    row("qkv",            "column", "hidden", "{attn}.q_proj.weight lq", "{attn}.k_proj.weight lq", "{attn}.v_proj.weight lq"),
    channels("conv",      "column", "taps",   "{attn}.q_conv1d.weight lq", "{attn}.k_conv1d.weight lq",
             "{attn}.v_conv1d.weight lq"),
    row("forget",         "column", "hidden", "{attn}.f_proj.weight lq"),
    row("beta",           "column", "hidden", "{attn}.b_proj.weight heads"),
    row("dt_bias",        "column", "",       "{attn}.dt_bias lq"),
    row("A_log",          "column", "",       "{attn}.A_log heads"),
    row("gate",           "column", "hidden", "{attn}.g_proj.weight lq"),
    row("o_norm",         "",       "",       "{attn}.o_norm.weight lhead"),
    row("o",              "row",    "lq",     "{attn}.{dense}.weight hidden"),
)
NORMS = (
    row("attn_norm",      "",       "",       "input_layernorm.weight hidden"),
    row("mlp_norm",       "",       "",       "post_attention_layernorm.weight hidden"),
)
DENSE = (
    row("gate_up",        "column", "hidden", "mlp.gate_proj.weight inner", "mlp.up_proj.weight inner"),
    row("down",           "row",    "inner",  "mlp.down_proj.weight hidden"),
)
EXPERTS = (
    row("router",             "",       "hidden", "mlp.gate.weight experts"),
    row("expert_bias",        "",       "",       "mlp.gate.{bias} experts", when="expert_bias"),
    experts("expert_gate_up", "column", "hidden", "mlp.experts.{e}.gate_proj.weight moe", "mlp.experts.{e}.up_proj.weight moe",
            packed="mlp.experts.gate_up_proj"),
    experts("expert_down",    "row",    "moe",    "mlp.experts.{e}.down_proj.weight hidden", packed="mlp.experts.down_proj"),
    row("shared_gate_up",     "column", "hidden", "mlp.shared_experts.gate_proj.weight inner_shared",
        "mlp.shared_experts.up_proj.weight inner_shared", when="shared"),
    row("shared_down",        "row",    "inner_shared", "mlp.shared_experts.down_proj.weight hidden", when="shared"),
)
END = (
    row("norm",           "",       "",       "norm.weight hidden"),
)
# fmt: on
EMBEDS = "model.word_embeddings.weight", "model.embed_tokens.weight"


def table(config: BailingShape, names: Collection[str] | None = None) -> Table:
    """The table of a model.

    Args:
        config: the model.
        names: the tensors in the file; those of the published models, when None. They say how the file calls the
            embedding, attention, its output, and the bias that selects experts.

    Raises:
        LayoutError: the file has no embedding, or two.
    """
    names = _published(config) if names is None else names
    embed = prefix(names, "", EMBEDS)
    words = {
        "attn": word(names, "attention", "self_attn"),
        "dense": word(names, "dense", "o_proj"),
        "bias": word(names, "expert_bias", "e_score_correction_bias"),
    }
    size = sizes(config)
    kinds = zip(config.layer_types, config.dense_layers, strict=True)
    layers = (
        Section(f"model.layers.{i}.", f"layers.{i}.", chosen(config, _rows(config, kind, dense)), size, words)
        for i, (kind, dense) in enumerate(kinds)
    )
    ends = Section("model.", "", END, size)
    return Table((ends, *layers), embed, (config.vocab_size, config.hidden_size), names, config.tie_embeddings)


def left_out(config: BailingShape) -> tuple[str, ...]:
    """Patterns of the tensors that are no part of the model: what predicts further tokens."""
    first = len(config.layer_types)
    return ("model.mtp.*", *(f"model.layers.{first + i}.*" for i in range(config.further_layers)))


def sizes(config: BailingShape) -> dict[str, Size | int]:
    """The sizes that the table names."""
    heads, wide = config.num_heads, config.num_heads * config.linear_head_dim
    linear_kv = config.linear_kv_heads
    known: dict[str, Size | int] = {
        "hidden": config.hidden_size,
        "heads": Size(heads, heads),
        "q": Size(heads * config.head_dim, heads),
        "kv": Size(config.num_kv_heads * config.head_dim, config.num_kv_heads, copied=True),
        "head": config.head_dim,
        "lq": Size(wide, heads),
        "lkv": Size(linear_kv * config.linear_head_dim, linear_kv, copied=True),
        "lhead": config.linear_head_dim,
        "taps": config.delta_taps,
        "inner": config.intermediate_size,
        "moe": config.moe_intermediate_size,
        "inner_shared": config.shared_intermediate_size,
        "experts": config.num_experts,
    }
    latent = config.latent
    if latent is None:
        return known
    return known | {
        "q_rank": latent.q_rank,
        "kv_rank": latent.kv_rank,
        "queries": Size(heads * (latent.nope_dim + latent.rope_dim), heads),
        "kv_a": latent.kv_rank + latent.rope_dim,
        "kv_b": Size(heads * (latent.nope_dim + latent.value_dim), heads),
        "values": Size(heads * latent.value_dim, heads),
    }


def _rows(config: BailingShape, kind: str, dense: bool) -> tuple[Row | Dealt, ...]:
    return (*NORMS, *_attention(config, kind), *(DENSE if dense else EXPERTS))


def _attention(config: BailingShape, kind: str) -> tuple[Row | Dealt, ...]:
    if kind != FULL:
        return DELTA if config.delta_taps else DECAY
    if config.latent is None:
        return GROUPED
    queries = LATENT_QUERIES if config.latent.q_rank else QUERIES
    return (*queries, *LATENT, *(HEAD_GATE if config.latent.gated else ()))


def _published(config: BailingShape) -> frozenset[str]:
    return frozenset([EMBEDS[0]] if config.tie_embeddings else [EMBEDS[0], HEAD])
