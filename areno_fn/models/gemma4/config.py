"""gemma4: what its layout needs of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.fields import Fields
from areno_fn.models.text_fields import TextFields

FULL, SLIDING = "full_attention", "sliding_attention"


@attrs.frozen(kw_only=True)
class Gemma4Layer:
    """What differs from layer to layer.

    Attributes:
        head_dim, num_kv_heads: of its attention.
        keys: it has keys and values of its own; otherwise it reads those of an earlier layer.
        values: the values have a matrix of their own; otherwise the keys' serves both.
        intermediate_size: inner size of its dense block.
    """

    head_dim: int
    num_kv_heads: int
    keys: bool
    values: bool
    intermediate_size: int


@attrs.frozen(kw_only=True)
class Gemma4Shape:
    """The sizes of a text model.

    Attributes:
        vocab_size, hidden_size, num_heads: as in a dense decoder.
        layers: what differs from layer to layer.
        per_layer_vocab, per_layer_size: of the inputs that every layer has of its own; size 0: there are none.
        num_experts, moe_intermediate_size: of the block of experts; 0: there is none.
        tie_embeddings: the embedding is the output matrix as well.
        bias: query, key, value and output projections have a bias.
        nested: the text model is a part of a larger one.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    layers: tuple[Gemma4Layer, ...]
    per_layer_vocab: int
    per_layer_size: int
    num_experts: int
    moe_intermediate_size: int
    tie_embeddings: bool
    bias: bool
    nested: bool

    @property
    def per_layer(self) -> bool:
        """Every layer has an input of its own."""
        return self.per_layer_size > 0

    @property
    def moe(self) -> bool:
        """Every layer has a block of experts beside its dense one."""
        return self.num_experts > 0


def config_from_hf(hf: Mapping[str, Any]) -> Gemma4Shape:
    """Reads a Hugging Face configuration with `model_type` gemma4 or gemma4_text.

    Raises:
        ModelError: a field that is missing, of another type, or that asks for what cannot be laid out.
    """
    text = TextFields(hf, "gemma4", "gemma4", "gemma4_text")
    fields = text.fields
    moe = fields.boolean("enable_moe_block", default=False)
    return Gemma4Shape(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        layers=_layers(text),
        per_layer_vocab=fields.integer("vocab_size_per_layer_input", default=262144),
        per_layer_size=fields.integer("hidden_size_per_layer_input", default=256, least=0),
        num_experts=fields.integer("num_experts") if moe else 0,
        moe_intermediate_size=fields.integer("moe_intermediate_size") if moe else 0,
        tie_embeddings=text.tied(True),
        bias=fields.boolean("attention_bias", default=False),
        nested=text.nested,
    )


def _layers(text: TextFields) -> tuple[Gemma4Layer, ...]:
    fields = text.fields
    count = fields.integer("num_hidden_layers")
    types = (*text.layer_types(count, FULL, SLIDING, 6)[:-1], FULL)  # the last layer is full whatever the list says
    own = count - fields.integer("num_kv_shared_layers", default=0, least=0)
    if own < 0:
        raise fields.error(f"num_kv_shared_layers exceeds num_hidden_layers, which is {count}")
    same = fields.boolean("attention_k_eq_v", default=False)
    inner = fields.integer("intermediate_size")
    wide = 2 * inner if fields.boolean("use_double_wide_mlp", default=False) else inner
    heads = _attention(fields, types, same)
    return tuple(
        Gemma4Layer(
            head_dim=heads[i][0],
            num_kv_heads=heads[i][1],
            keys=i < own,
            values=i < own and not (same and kind == FULL),
            intermediate_size=inner if i < own else wide,
        )
        for i, kind in enumerate(types)
    )


def _attention(fields: Fields, types: tuple[str, ...], same: bool) -> list[tuple[int, int]]:
    """`head_dim` and `num_kv_heads` of each layer: from `per_layer_config`, or by the kind of layer where it is absent."""
    plain = fields.integer("head_dim", default=256), fields.integer("num_key_value_heads")
    overrides = fields.table("per_layer_config")
    if overrides is None:
        shared = fields.integer("num_global_key_value_heads", default=None) if same else None
        full = fields.integer("global_head_dim", default=512), shared or plain[1]
        made = [full if kind == FULL else plain for kind in types]
    else:
        made = [plain] * len(types)
        for number, table in overrides.items():
            if not (number.isdecimal() and int(number) < len(types)):
                raise fields.error(f"per_layer_config has an entry for layer {number!r}, which does not exist")
            layer = Fields(table, f"per_layer_config of layer {number}")
            made[int(number)] = (
                layer.integer("head_dim", default=plain[0]),
                layer.integer("num_key_value_heads", default=plain[1]),
            )
            layer.finish()
    heads = fields.integer("num_attention_heads")
    for i, (_, kv) in enumerate(made):
        if heads % kv:
            raise fields.error(f"num_attention_heads {heads} is not a multiple of the {kv} key heads of layer {i}")
    return made
