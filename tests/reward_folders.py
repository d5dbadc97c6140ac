"""Small folders of reward models, as transformers writes them, and what transformers says with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from areno_fn.world import tokenizer_export

transformers.utils.logging.disable_progress_bar()

PEERS = {
    "llama": transformers.LlamaForSequenceClassification,
    "qwen2": transformers.Qwen2ForSequenceClassification,
    "qwen3": transformers.Qwen3ForSequenceClassification,
}
SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 258,
    "num_labels": 1,
}


def peer(name: str = "llama", seed: int = 0, **config: Any) -> Any:
    """A model of transformers with random numbers in every parameter."""
    kind = PEERS[name]
    model = kind(kind.config_class(**(SIZES | config))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator).add_(1.0 if "norm" in path else 0.0)
    return model


def write(folder: Path, name: str = "llama", seed: int = 0, **config: Any) -> Any:
    """A folder with that model and the byte tokenizer; returns the model."""
    model = peer(name, seed, **config)
    model.save_pretrained(folder)
    tokenizer_export.export(folder)
    return model


def scores(model: Any, documents: Sequence[Sequence[int]], padding: int) -> list[float]:
    """What transformers says of a batch that is padded on the right."""
    longest = max(map(len, documents))
    tokens = torch.tensor([[*document, *[padding] * (longest - len(document))] for document in documents])
    mask = torch.tensor([[1] * len(document) + [0] * (longest - len(document)) for document in documents])
    with torch.no_grad():
        found: list[float] = model(input_ids=tokens, attention_mask=mask).logits[:, 0].tolist()
    return found
