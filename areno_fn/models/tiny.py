"""Tiny configurations of the families, for tests: by name, and any that a function chooses.

They are contents of a `config.json` that transformers reads too, with every size its own where the family lets it,
so that a layout that takes one for the other is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of the options that it is given."""

Config = dict[str, Any]


def attention(choose: Choose) -> Config:
    """Sizes that every family has: a vocabulary, a width, heads and their channels, and whether the head is tied."""
    kv = choose([1, 2, 3, 4])
    return {
        "vocab_size": choose([5, 8, 13]),
        "hidden_size": choose([3, 8, 12]),
        "num_attention_heads": kv * choose([1, 2, 4]),
        "num_key_value_heads": kv,
        "head_dim": choose([2, 4, 8]),
        "num_hidden_layers": choose([1, 2, 3, 4]),
        "tie_word_embeddings": choose([True, False]),
    }


def inner(choose: Choose) -> int:
    """An inner size of a block."""
    size: int = choose([3, 6, 8, 24])
    return size


def nested(text: Config, outer: str, text_type: str, choose: Choose) -> Config:
    """A text configuration as it is, or as the `text_config` of a larger model."""
    if choose([True, False]):
        return {"model_type": text_type, **text}
    return {"model_type": outer, "text_config": {"model_type": text_type, **text}}
