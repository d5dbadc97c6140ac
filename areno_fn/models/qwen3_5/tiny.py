"""Tiny configurations of qwen3_5, dense and with experts."""

from __future__ import annotations

from areno_fn.models.tiny import Choose, Config, attention, inner, nested

TEXT: Config = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS: Config = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 10,
}
_VISION: Config = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "patch_size": 2,
}


def _whole(family: str, text: Config) -> Config:
    vision = {"model_type": f"{family}_vision", **_VISION}
    outer = {"tie_word_embeddings": text["tie_word_embeddings"], "vision_config": vision}
    return {"model_type": family, **outer, "text_config": {"model_type": f"{family}_text", **text}}


_DENSE: Config = {**TEXT, "intermediate_size": 12}
VARIANTS: dict[str, Config] = {
    "text": {"model_type": "qwen3_5_text", **_DENSE},
    "text with biases, tied": {
        "model_type": "qwen3_5_text",
        **_DENSE,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "whole": _whole("qwen3_5", _DENSE),
    "whole, tied": _whole("qwen3_5", {**_DENSE, "tie_word_embeddings": True}),
}
MOE_VARIANTS: dict[str, Config] = {
    "text": {"model_type": "qwen3_5_moe_text", **TEXT, **_EXPERTS},
    "whole": _whole("qwen3_5_moe", {**TEXT, **_EXPERTS}),
}


def random_text(choose: Choose) -> Config:
    """Sizes of a dense text model, whatever `choose` picks."""
    sizes = attention(choose)
    heads = choose([1, 2, 3, 4])
    kinds = choose([["linear_attention"], ["full_attention"], ["linear_attention", "full_attention"]])
    return {
        **sizes,
        "intermediate_size": inner(choose),
        "layer_types": [kinds[i % len(kinds)] for i in range(sizes["num_hidden_layers"])],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * choose([1, 2]),
        "linear_key_head_dim": choose([2, 5]),
        "linear_value_head_dim": choose([3, 5]),
        "linear_conv_kernel_dim": choose([1, 4]),
        "attention_bias": choose([True, False]),
    }


def random_config(choose: Choose) -> Config:
    """A dense model, whatever `choose` picks."""
    return nested(random_text(choose), "qwen3_5", "qwen3_5_text", choose)


def random_moe_config(choose: Choose) -> Config:
    """A model with experts, whatever `choose` picks."""
    text = random_text(choose)
    text |= {"num_experts": choose([1, 2, 3]), "moe_intermediate_size": text.pop("intermediate_size")}
    text["shared_expert_intermediate_size"] = inner(choose)
    return nested(text, "qwen3_5_moe", "qwen3_5_moe_text", choose)
