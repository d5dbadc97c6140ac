"""qwen3_5 and qwen3_5_moe: what their layout needs of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.text_fields import TextFields

FULL, LINEAR = "full_attention", "linear_attention"


@attrs.frozen(kw_only=True)
class Qwen35Shape:
    """The sizes of a hybrid of gated attention and gated delta nets, dense or with experts.

    Attributes:
        vocab_size, hidden_size, num_heads, num_kv_heads, head_dim: as in a dense decoder.
        intermediate_size: inner size of a dense block; 0 in a model with experts.
        layer_types: the kind of each layer, `FULL` or `LINEAR`.
        linear_key_heads, linear_value_heads, linear_key_dim, linear_value_dim: heads of the delta net, their channels.
        conv_width: taps of the convolution.
        num_experts: experts in every layer; 0: the model is dense.
        moe_intermediate_size, shared_intermediate_size: inner sizes of an expert and of the shared one.
        tie_embeddings: the embedding is the output matrix as well.
        bias: query, key, value and output projections have a bias.
        nested: the text model is a part of a larger one.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int
    num_experts: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    tie_embeddings: bool
    bias: bool
    nested: bool


def config_from_hf(hf: Mapping[str, Any]) -> Qwen35Shape:
    """Reads a Hugging Face configuration with `model_type` qwen3_5 or qwen3_5_moe, flat or with a `text_config`.

    Raises:
        ModelError: a field that is missing, of another type, or that asks for what cannot be laid out.
    """
    return read(TextFields(hf, "qwen3_5", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"))


def read(text: TextFields) -> Qwen35Shape:
    """Reads the text part of a configuration that has been opened.

    Raises:
        ModelError: as for `config_from_hf`.
    """
    fields = text.fields
    layers = fields.integer("num_hidden_layers")
    key_heads, value_heads = (fields.integer(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise fields.error(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    experts = fields.integer("num_experts", default=0, least=0)
    return Qwen35Shape(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        **text.heads(head_dim=256),
        intermediate_size=0 if experts else fields.integer("intermediate_size"),
        layer_types=text.layer_types(layers, FULL, LINEAR, fields.integer("full_attention_interval", default=4)),
        linear_key_heads=key_heads,
        linear_value_heads=value_heads,
        linear_key_dim=fields.integer("linear_key_head_dim", default=128),
        linear_value_dim=fields.integer("linear_value_head_dim", default=128),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4),
        num_experts=experts,
        moe_intermediate_size=fields.integer("moe_intermediate_size") if experts else 0,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size") if experts else 0,
        tie_embeddings=text.tied(False),
        bias=fields.boolean("attention_bias", default=False),
        nested=text.nested,
    )
