"""llama in a file: the names of Hugging Face, and the leaves they become."""

from __future__ import annotations

from collections.abc import Collection

from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.models.decoder_checkpoint import EMBED, DecoderShape, decoder_table
from areno_fn.models.table import HEAD, Table, row

# fmt: off
LAYER = (
    #   leaf            place     columns   names in the file, in the order in which they are laid, each with its rows
    row("attn_norm",    "",       "",       "input_layernorm.weight hidden"),
    row("qkv",          "column", "hidden", "self_attn.q_proj.weight q", "self_attn.k_proj.weight kv",
        "self_attn.v_proj.weight kv"),
    row("qkv_bias",     "column", "",       "self_attn.q_proj.bias q", "self_attn.k_proj.bias kv", "self_attn.v_proj.bias kv",
        when="qkv_bias"),
    row("o",            "row",    "q",      "self_attn.o_proj.weight hidden"),
    row("o_bias",       "",       "",       "self_attn.o_proj.bias hidden", when="o_bias"),
    row("mlp_norm",     "",       "",       "post_attention_layernorm.weight hidden"),
    row("gate_up",      "column", "hidden", "mlp.gate_proj.weight inner", "mlp.up_proj.weight inner"),
    row("gate_up_bias", "column", "",       "mlp.gate_proj.bias inner", "mlp.up_proj.bias inner", when="mlp_bias"),
    row("down",         "row",    "inner",  "mlp.down_proj.weight hidden"),
    row("down_bias",    "",       "",       "mlp.down_proj.bias hidden", when="mlp_bias"),
)
# fmt: on


def table(config: DecoderShape, names: Collection[str] | None = None) -> Table:
    """The table of a model whose file has the tensors `names`; those that transformers writes, when None."""
    return decoder_table(config, LAYER, names)


def layout(config: DecoderShape, *, head_in_file: bool) -> Iso:
    """From the names in a file to the paths of a `Decoder`; `Table` says what becomes of the head."""
    return table(config, (EMBED, HEAD) if head_in_file else (EMBED,)).layout


def placements(config: DecoderShape, names: Collection[str] | None = None) -> dict[str, Placement]:
    """How ranks share each leaf."""
    return table(config, names).placements()
