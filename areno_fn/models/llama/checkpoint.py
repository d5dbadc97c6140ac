"""llama in a file: the names of Hugging Face, and the leaves they become."""

from __future__ import annotations

from areno_fn.contracts.layout import Iso
from areno_fn.models.decoder_checkpoint import DecoderShape, decoder_layout, row

# fmt: off
LAYER = (
    #   leaf            columns   names in the file, in the order in which they are laid, each with its rows
    row("attn_norm",    "",       "input_layernorm.weight hidden"),
    row("qkv",          "hidden", "self_attn.q_proj.weight q", "self_attn.k_proj.weight kv", "self_attn.v_proj.weight kv"),
    row("qkv_bias",     "",       "self_attn.q_proj.bias q", "self_attn.k_proj.bias kv", "self_attn.v_proj.bias kv",
        when="qkv_bias"),
    row("o",            "q",      "self_attn.o_proj.weight hidden"),
    row("o_bias",       "",       "self_attn.o_proj.bias hidden", when="o_bias"),
    row("mlp_norm",     "",       "post_attention_layernorm.weight hidden"),
    row("gate_up",      "hidden", "mlp.gate_proj.weight inner", "mlp.up_proj.weight inner"),
    row("gate_up_bias", "",       "mlp.gate_proj.bias inner", "mlp.up_proj.bias inner", when="mlp_bias"),
    row("down",         "inner",  "mlp.down_proj.weight hidden"),
    row("down_bias",    "",       "mlp.down_proj.bias hidden", when="mlp_bias"),
)
# fmt: on


def layout(config: DecoderShape, *, head_in_file: bool) -> Iso:
    """From the names in a file to the paths of a `Decoder`; `decoder_layout` says what becomes of the head."""
    return decoder_layout(config, LAYER, head_in_file=head_in_file)
