"""Tiny configurations of qwen3_moe."""

from __future__ import annotations

from areno_fn.models.tiny import Choose, Config, attention, inner

_PLAIN: Config = {
    "model_type": "qwen3_moe",
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
VARIANTS: dict[str, Config] = {
    "every layer": _PLAIN,
    "one dense layer": {**_PLAIN, "mlp_only_layers": [1]},
    "every second layer": {**_PLAIN, "decoder_sparse_step": 2, "attention_bias": True},
    "tied": {**_PLAIN, "tie_word_embeddings": True},
}


def random_config(choose: Choose) -> Config:
    """Whatever `choose` picks."""
    sizes = attention(choose)
    experts = choose([1, 2, 3, 5])
    return {
        "model_type": "qwen3_moe",
        **sizes,
        "intermediate_size": inner(choose),
        "moe_intermediate_size": inner(choose),
        "num_experts": experts,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": choose([1, 2]),
        "mlp_only_layers": choose([[], [0], list(range(sizes["num_hidden_layers"]))]),
        "attention_bias": choose([True, False]),
    }
