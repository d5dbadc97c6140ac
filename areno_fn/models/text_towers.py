"""What frozen text encoders say of a prompt. Both the tokenizer and the encoder are those of transformers."""

from __future__ import annotations

from typing import Any

import torch


def padded_ids(tokenizer: Any, prompt: str, length: int, device: torch.device) -> torch.Tensor:
    """The tokens of a prompt, cut and padded to a length, int64 [1, L]."""
    ids: torch.Tensor = tokenizer(
        [prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids.to(device)


def length_of(tokenizer: Any, prompt: str, most: int = 0) -> tuple[int, int]:
    """How many tokens a prompt becomes, and how many are read.

    Args:
        most: read; 0: as many as the tokenizer says.
    """
    return len(tokenizer(prompt, verbose=False).input_ids), most or tokenizer.model_max_length


def clip_states(tokenizer: Any, encoder: Any, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The states [1, L, D] before CLIP's last layer, and its projected vector [1, P]."""
    ids = padded_ids(tokenizer, prompt, tokenizer.model_max_length, encoder.device)
    found = encoder(ids, output_hidden_states=True)
    return found.hidden_states[-2], found.text_embeds


def clip_pooled(tokenizer: Any, encoder: Any, prompt: str) -> torch.Tensor:
    """The pooled vector [1, D] of a CLIP encoder without a projection."""
    ids = padded_ids(tokenizer, prompt, tokenizer.model_max_length, encoder.device)
    pooled: torch.Tensor = encoder(ids).pooler_output
    return pooled


def t5_states(tokenizer: Any, encoder: Any, prompt: str, length: int) -> torch.Tensor:
    """The last states [1, length, D] of a T5 encoder, which sees the padding too."""
    states: torch.Tensor = encoder(padded_ids(tokenizer, prompt, length, encoder.device))[0]
    return states
