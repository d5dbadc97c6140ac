"""Reads only what a layout needs from a Hugging Face configuration whose forward is not written here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areno_fn.models.fields import Fields


class TextFields:
    """The text part of a configuration: the table itself, or its `text_config`.

    Attributes:
        fields: the text part.
        nested: it is a `text_config`, so the model has other parts too.
    """

    def __init__(self, hf: Mapping[str, Any], family: str, *types: str) -> None:
        """Opens a configuration.

        Args:
            hf: the configuration.
            family: what messages call it.
            types: what `model_type` may be, outside and inside.

        Raises:
            ModelError: another `model_type`, weights that are quantised, or a `text_config` that is no table.
        """
        self._outer = Fields(hf, f"{family} configuration")
        inner = self._outer.table("text_config")
        self.nested = inner is not None
        self.fields = Fields(inner, f"text_config of a {family} configuration") if self.nested else self._outer
        for fields in dict.fromkeys((self._outer, self.fields)):
            fields.expect("model_type", *types)
            fields.expect("quantization_config")

    def tied(self, default: bool) -> bool:
        """Whether the embedding is the output matrix as well; what the whole model says goes before its text part."""
        inner: bool = self.fields.boolean("tie_word_embeddings", default=default)
        outer: bool = self._outer.boolean("tie_word_embeddings", default=inner)
        return outer

    def heads(self, *, head_dim: int | None = None) -> dict[str, Any]:
        """Sizes of grouped attention: `num_heads`, `num_kv_heads` and `head_dim`.

        Args:
            head_dim: `head_dim` when it is not given; None stands for hidden size / heads.
        """
        fields = self.fields
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        shared = fields.integer("num_key_value_heads", default=heads)
        if heads % shared:
            raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}")
        channels = fields.integer("head_dim", default=head_dim)
        if channels is None and hidden % heads:
            raise fields.error(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing"
            )
        return {"num_heads": heads, "num_kv_heads": shared, "head_dim": channels or hidden // heads}

    def layer_types(self, layers: int, every: str, other: str, interval: int) -> tuple[str, ...]:
        """The kind of each layer: what `layer_types` says, else `every` at each multiple of the interval, else `other`.

        Raises:
            ModelError: a list of another length, or a kind that is neither.
        """
        given = self.fields.strings("layer_types")
        if given is None:
            return tuple(every if (i + 1) % interval == 0 else other for i in range(layers))
        if len(given) != layers:
            raise self.fields.error(f"layer_types has {len(given)} entries, but num_hidden_layers is {layers}")
        for i, kind in enumerate(given):
            if kind not in (every, other):
                raise self.fields.error(f"layer_types[{i}] is {kind!r}; it can be {every!r} or {other!r}")
        return tuple(given)
