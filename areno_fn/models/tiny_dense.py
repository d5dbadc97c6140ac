"""Tiny configurations of the dense decoders."""

from __future__ import annotations

from areno_fn.models.tiny import Choose, Config, attention, inner

_SIZES: Config = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}


def variants(family: str) -> dict[str, Config]:
    """By name."""
    plain = {"model_type": family, **_SIZES}
    made = {"untied": {**plain, "tie_word_embeddings": False}, "tied": {**plain, "tie_word_embeddings": True}}
    if family == "qwen2":
        return made
    made["biases"] = {**plain, "attention_bias": True}
    if family == "llama":
        made["biases"]["mlp_bias"] = True
    return made


def random_config(family: str, choose: Choose) -> Config:
    """Whatever `choose` picks."""
    made = {
        "model_type": family,
        "max_position_embeddings": 64,
        **attention(choose),
        "intermediate_size": inner(choose),
    }
    if family != "qwen2":
        made["attention_bias"] = choose([True, False])
    if family == "llama":
        made["mlp_bias"] = choose([True, False])
    return made
