"""Tiny configurations of the three generations of bailing."""

from __future__ import annotations

from areno_fn.models.tiny import Choose, Config, attention, inner

_PLAIN: Config = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_DECAY: Config = {"use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "group_norm_size": 2}
_LATENT: Config = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
_DELTA: Config = {
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "short_conv_kernel_size": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
VARIANTS: dict[str, Config] = {
    "grouped": {"model_type": "bailing_moe_linear", **_PLAIN, **_DECAY, "num_key_value_heads": 2},
    "grouped, with a tail": {
        "model_type": "bailing_moe_linear",
        **_PLAIN,
        **_DECAY,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "use_qkv_bias": True,
        "num_shared_experts": 2,
        "moe_shared_expert_intermediate_size": 4,
        "tie_word_embeddings": True,
    },
    "latent": {"model_type": "bailing_hybrid", **_PLAIN, **_DECAY, **_LATENT, "num_nextn_predict_layers": 1},
    "latent queries": {"model_type": "bailing_hybrid", **_PLAIN, **_DECAY, **_LATENT, "q_lora_rank": 7},
}
DELTA_VARIANTS: dict[str, Config] = {
    "delta": {"model_type": "bailing_hybrid", **_PLAIN, **_LATENT, **_DELTA},
    "delta, latent queries": {"model_type": "bailing_hybrid", **_PLAIN, **_LATENT, **_DELTA, "q_lora_rank": 7},
}
"""Those that transformers has too."""


def random_config(choose: Choose) -> Config:
    """Whatever `choose` picks."""
    made = attention(choose)
    generation = choose(["grouped", "latent", "delta"])
    made |= {
        "model_type": "bailing_moe_linear" if generation == "grouped" else "bailing_hybrid",
        "intermediate_size": inner(choose),
        "moe_intermediate_size": inner(choose),
        "num_experts": choose([0, 1, 3]),
        "num_shared_experts": choose([0, 1, 2]),
        "moe_router_enable_expert_bias": choose([True, False]),
        "first_k_dense_replace": choose([0, 1]),
        "layer_group_size": choose([1, 2, 3]),
        "num_kv_heads_for_linear_attn": choose([0, 1]),
        "num_nextn_predict_layers": choose([0, 1]),
        "use_qk_norm": choose([True, False]),
        "use_qkv_bias": choose([True, False]),
    }
    if generation != "grouped":
        made |= {**_LATENT, "q_lora_rank": choose([None, 7])}
    if generation == "delta":
        made |= {"kda_safe_gate": True, "short_conv_kernel_size": choose([2, 4])}
    return made
