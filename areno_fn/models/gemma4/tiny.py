"""Tiny configurations of gemma4."""

from __future__ import annotations

from areno_fn.models.tiny import Choose, Config, attention, inner, nested

_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_TEXT: Config = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "global_head_dim": 8,
    "layer_types": _KINDS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 11,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
_INPUTS: Config = {"hidden_size_per_layer_input": 3}
_SHARED: Config = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_SAME: Config = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS: Config = {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 8}
_VISION: Config = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "position_embedding_size": 8,
    "patch_size": 2,
}


def _text(*changes: Config) -> Config:
    made: Config = {"model_type": "gemma4_text", **_TEXT}
    for change in changes:
        made |= change
    return made


VARIANTS: dict[str, Config] = {
    "dense": _text(),
    "untied": _text({"tie_word_embeddings": False}),
    "inputs per layer, shared keys": _text(_INPUTS, _SHARED),
    "keys as values": _text(_SAME),
    "experts": _text(_EXPERTS, _SAME),
    "biases": _text({"attention_bias": True}, _INPUTS),
    "whole": {
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "text_config": _text(_INPUTS, _SHARED),
        "vision_config": _VISION,
        "audio_config": None,
    },
}


def random_config(choose: Choose) -> Config:
    """Whatever `choose` picks."""
    text = attention(choose)
    layers, experts = text["num_hidden_layers"], choose([0, 1, 3])
    text |= {
        "intermediate_size": inner(choose),
        "global_head_dim": choose([2, 6]),
        "layer_types": [choose(["sliding_attention", "full_attention"]) for _ in range(layers)],
        "hidden_size_per_layer_input": choose([0, 3]),
        "vocab_size_per_layer_input": choose([4, 11]),
        "num_kv_shared_layers": choose(list(range(layers))),
        "use_double_wide_mlp": choose([True, False]),
        "attention_k_eq_v": choose([True, False]),
        "num_global_key_value_heads": choose([None, 1]),
        "attention_bias": choose([True, False]),
        "enable_moe_block": experts > 0,
    }
    if experts:
        text |= {"num_experts": experts, "top_k_experts": 1, "moe_intermediate_size": inner(choose)}
    return nested(text, "gemma4", "gemma4_text", choose)
