"""How the tensors of a Hugging Face file become the parameters of the dense decoder: the part the families share.

A family declares a table of `Row`s in its `checkpoint.py`; `decoder_layout` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import attrs

from areno_fn.contracts.layout import Iso, TensorSpec, concat, product, rename, tie

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYER = "model.layers.{}."


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


@attrs.frozen
class Row:
    """One leaf of a layer.

    Attributes:
        leaf: field of the layer's record.
        columns: size of the second dimension by its name in `sizes`; empty for a vector.
        parts: names in the file within the layer, in the order in which they are laid, each with its rows.
        when: flag of the configuration without which the leaf does not exist; empty: always.
    """

    leaf: str
    columns: str
    parts: tuple[tuple[str, str], ...]
    when: str = ""


def row(leaf: str, columns: str, *parts: str, when: str = "") -> Row:
    """A `Row` as a line of a table; a part is written "name rows"."""
    pairs = (part.split() for part in parts)
    return Row(leaf, columns, tuple((name, rows) for name, rows in pairs), when)


def decoder_layout(config: DecoderShape, rows: Iterable[Row], *, head_in_file: bool) -> Iso:
    """From the names in a file to the paths of a `Decoder`.

    The head follows the file: without `lm_head.weight` the embedding serves as the head, whatever the
    configuration says, so that no head is ever left random; with it, it is a leaf of its own, unless the
    configuration ties it: then both tensors are one leaf, must be equal, and are both written back.

    Args:
        config: the model.
        rows: the leaves of a layer.
        head_in_file: the file has, or is to have, a tensor `lm_head.weight`.
    """
    size = sizes(config)
    table = [r for r in rows if not r.when or getattr(config, r.when)]
    ends = [rename("model.norm.weight", "norm", _spec(size, "hidden", ""))]
    vocabulary = _spec(size, "vocab", "hidden")
    if head_in_file and config.tie_embeddings:
        ends.append(tie("embed", (EMBED, HEAD), vocabulary))
    else:
        ends.append(rename(EMBED, "embed", vocabulary))
        if head_in_file:
            ends.append(rename(HEAD, "head", vocabulary))
    return product([*ends, *(_leaf(size, r, number) for number in range(config.num_layers) for r in table)])


def sizes(config: DecoderShape) -> dict[str, int]:
    """The sizes that a table names."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "head": config.head_dim,
    }


def _leaf(size: dict[str, int], r: Row, number: int) -> Iso:
    parts = {LAYER.format(number) + name: _spec(size, rows, r.columns) for name, rows in r.parts}
    target = f"layers.{number}.{r.leaf}"
    if len(parts) > 1:
        return concat(parts, target)
    ((name, spec),) = parts.items()
    return rename(name, target, spec)


def _spec(size: dict[str, int], rows: str, columns: str) -> TensorSpec:
    return TensorSpec((size[rows], size[columns]) if columns else (size[rows],))
