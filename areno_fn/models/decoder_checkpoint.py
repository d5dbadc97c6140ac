"""How the tensors of a Hugging Face file become the parameters of the dense decoder: the part the families share.

A family declares a table of rows in its `checkpoint.py`; `decoder_table` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from areno_fn.models.table import HEAD, Row, Section, Size, Table, chosen, row

EMBED = "model.embed_tokens.weight"
END = (row("norm", "", "", "norm.weight hidden"),)


class DecoderShape(Protocol):
    """What a layout asks of a configuration; `areno_fn.models.decoder.DecoderConfig` answers it."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def hidden_size(self) -> int:
        """D."""
        ...

    @property
    def intermediate_size(self) -> int:
        """I."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """The embedding is the output matrix as well."""
        ...


def decoder_table(config: DecoderShape, rows: Iterable[Row], names: Collection[str] | None = None) -> Table:
    """The table of a model, from the names in a file to the paths of a `Decoder`.

    Args:
        config: the model.
        rows: the leaves of a layer.
        names: the tensors in the file; those that transformers writes, when None.
    """
    if names is None:
        names = (EMBED,) if config.tie_embeddings else (EMBED, HEAD)
    size, present = sizes(config), chosen(config, rows)
    layers = (Section(f"model.layers.{i}.", f"layers.{i}.", present, size) for i in range(config.num_layers))
    ends = Section("model.", "", END, size)
    return Table((ends, *layers), EMBED, (config.vocab_size, config.hidden_size), names, config.tie_embeddings)


def sizes(config: DecoderShape) -> dict[str, Size | int]:
    """The sizes that a table names."""
    return {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "q": Size(config.num_heads * config.head_dim, config.num_heads),
        "kv": Size(config.num_kv_heads * config.head_dim, config.num_kv_heads, copied=True),
        "head": config.head_dim,
    }
