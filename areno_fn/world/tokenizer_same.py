"""Whether two tokenizers give every text and every conversation the same ids."""

from __future__ import annotations

import json
from typing import Any

from areno_fn.world.tokenizer import Tokenizer
from areno_fn.world.tokenizer_bytes import ByteTokenizer
from areno_fn.world.tokenizer_export import build
from areno_fn.world.tokenizer_hf import HFTokenizer

_ASIDE = ("post_processor", "truncation", "padding")
"""Parts of a definition that are not used here: texts are encoded as they are, and the BOS is compared by itself."""


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether texts and conversations become the same ids, beginning and end included.

    What is compared is how they are defined, so tokenizers that no definition is known of are not the same.
    """
    definitions = [_definition(tokenizer) for tokenizer in (one, other)]
    ends = [(tokenizer.bos_id, tokenizer.eos_ids[:1]) for tokenizer in (one, other)]
    return None not in definitions and definitions[0] == definitions[1] and ends[0] == ends[1]


def same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether texts become the same ids, whatever is said of conversations and of ends."""
    first, second = _definition(one), _definition(other)
    return first is not None and second is not None and bool(first[0] == second[0])


def _definition(tokenizer: Tokenizer) -> Any:
    """The definition of a tokenizer as plain data, with how it treats the names of special tokens, and its template."""
    if isinstance(tokenizer, ByteTokenizer):
        return _core(build().to_str()), True, None
    if not isinstance(tokenizer, HFTokenizer):
        return None
    backend = getattr(tokenizer.backend, "backend_tokenizer", None)
    if backend is None:
        return None
    split = bool(getattr(tokenizer.backend, "split_special_tokens", False))
    return _core(backend.to_str()), split, tokenizer.backend.chat_template


def _core(text: str) -> dict[str, Any]:
    return {name: part for name, part in json.loads(text).items() if name not in _ASIDE}
