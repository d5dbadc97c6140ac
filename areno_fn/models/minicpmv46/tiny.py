"""Tiny configurations of minicpmv46."""

from __future__ import annotations

from areno_fn.models.qwen3_5.tiny import TEXT, random_text
from areno_fn.models.tiny import Choose, Config

_VISION: Config = {
    "model_type": "minicpmv4_6_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}


def _whole(text: Config, tied: bool) -> Config:
    return {
        "model_type": "minicpmv4_6",
        "tie_word_embeddings": tied,
        "insert_layer_id": 0,
        "text_config": {"model_type": "qwen3_5_text", **text},
        "vision_config": _VISION,
    }


_TEXT: Config = {**TEXT, "intermediate_size": 12}
VARIANTS: dict[str, Config] = {
    "untied": _whole(_TEXT, False),
    "tied": _whole({**_TEXT, "tie_word_embeddings": True}, True),
}


def random_config(choose: Choose) -> Config:
    """Whatever `choose` picks."""
    text = random_text(choose)
    return _whole(text, text["tie_word_embeddings"])
