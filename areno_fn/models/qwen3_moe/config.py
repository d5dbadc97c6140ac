"""qwen3_moe: what its layout needs of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.text_fields import TextFields


@attrs.frozen(kw_only=True)
class Qwen3MoeShape:
    """The sizes of a model with grouped attention and experts.

    Attributes:
        vocab_size, hidden_size, num_heads, num_kv_heads, head_dim: as in a dense decoder.
        intermediate_size: inner size of a dense layer.
        moe_intermediate_size: inner size of an expert.
        num_experts: experts in a layer that has them.
        dense_layers: for each layer, whether it has one dense block instead of experts.
        tie_embeddings: the embedding is the output matrix as well.
        bias: query, key, value and output projections have a bias.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    dense_layers: tuple[bool, ...]
    tie_embeddings: bool
    bias: bool


def config_from_hf(hf: Mapping[str, Any]) -> Qwen3MoeShape:
    """Reads a Hugging Face configuration with `model_type` qwen3_moe.

    Raises:
        ModelError: a field that is missing, of another type, or that asks for what cannot be laid out.
    """
    text = TextFields(hf, "qwen3_moe", "qwen3_moe")
    fields = text.fields
    layers = fields.integer("num_hidden_layers")
    experts = fields.integer("num_experts", default=fields.integer("num_local_experts", default=128), least=0)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers", default=())
    return Qwen3MoeShape(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        **text.heads(),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size", default=768),
        num_experts=experts,
        dense_layers=tuple(i in dense or experts == 0 or (i + 1) % step != 0 for i in range(layers)),
        tie_embeddings=text.tied(False),
        bias=fields.boolean("attention_bias", default=False),
    )
