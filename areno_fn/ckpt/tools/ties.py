"""Which of a folder's tensors its configuration declares to be one: the head that is the embedding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Whether a configuration ties the head to the embedding; None where it does not say."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        flag = values.get("tie_word_embeddings")
        if isinstance(flag, bool):
            return flag
    return None


def embedding_of(head: str, names: Collection[str]) -> str | None:
    """The tensor that a tied head is; None where `head` is no head, or no single embedding is among the names.

    Where there are several embeddings, the one that stands nearest to the head by its name is meant.
    """
    if head != _HEAD and not head.endswith(f".{_HEAD}"):
        return None
    found = [name for name in names if any(name == end or name.endswith(f".{end}") for end in _EMBEDDINGS)]
    shortest = [name for name in found if len(name) == min(map(len, found))]
    return shortest[0] if len(shortest) == 1 else None
