"""Every planted mistake in a layout is caught by a law, with a sentence that says what stands where.

A fault is listed with every law that catches it, because which do not is worth knowing: no round trip sees two
names that are swapped, and no comparison with a reference sees a value that is rounded on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from faults import layout_plants as plants
from faults.layout_plants import Model

from areno_fn.contracts.layout import Iso
from areno_fn.testing import laws

_SIZES = {
    "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "llama": Model({"model_type": "llama", **_SIZES, "attention_bias": True, "mlp_bias": True}, head=True),
    "llama, one kv head": Model({"model_type": "llama", **_SIZES, "num_key_value_heads": 1}, head=True),
    "llama, tied": Model({"model_type": "llama", **_SIZES, "tie_word_embeddings": True}, head=False),
    "llama, tied, with a head": Model({"model_type": "llama", **_SIZES, "tie_word_embeddings": True}, head=True),
    "qwen2": Model({"model_type": "qwen2", **_SIZES}, head=True),
    "qwen3": Model({"model_type": "qwen3", **_SIZES, "head_dim": 6}, head=True),
    "qwen3_moe": Model(
        {"model_type": "qwen3_moe", **_SIZES, "head_dim": 6, "num_experts": 11, "moe_intermediate_size": 8}, head=True
    ),
    "qwen3_5": Model({"model_type": "qwen3_5_text", **_SIZES, "head_dim": 8, **_LINEAR}, head=True),
}


@attrs.frozen
class Fault:
    """A planted mistake.

    Attributes:
        model: in whose layout it is.
        plant: builds the layout that has it: `(model)` into leaves, or `(model, ranks)` from leaves to ranks.
        caught: what each law that catches it says.
        ranks: how many; 0 for a layout into leaves.
    """

    model: str
    plant: Callable[..., Iso]
    caught: dict[str, str]
    ranks: int = 0


FAULTS: dict[str, Fault] = {
    "q, k, v laid as k, q, v": Fault(
        "qwen3",
        plants.wrong_concat_order,
        {
            "layout_agrees": "element [0, 0] of 'layers.1.qkv' is element [0, 0] of "
            "'model.layers.1.self_attn.k_proj.weight', it should be element [0, 0] of "
            "'model.layers.1.self_attn.q_proj.weight'"
        },
    ),
    "1 + w baked into the weight": Fault(
        "qwen3_5",
        plants.one_baked_into_norm,
        {
            "iso_roundtrip": "forward, element [0] of 'norm' is a number that none of the tensors given holds; "
            "a layout moves elements and computes nothing",
            "layout_agrees": "element [0] of 'norm' is a number that stands nowhere, it should be element [0] of "
            "'model.norm.weight'",
            "checkpoint_roundtrip": "loaded and saved: element [",
        },
    ),
    "gate and up swapped": Fault(
        "llama",
        plants.gate_and_up_swapped,
        {
            "layout_agrees": "element [0, 0] of 'layers.1.gate_up' is element [0, 0] of "
            "'model.layers.1.mlp.up_proj.weight', it should be element [0, 0] of 'model.layers.1.mlp.gate_proj.weight'"
        },
    ),
    "a square matrix transposed": Fault(
        "llama",
        plants.square_matrix_transposed,
        {
            "layout_agrees": "element [0, 1] of 'layers.0.o' is element [1, 0] of "
            "'model.layers.0.self_attn.o_proj.weight', it should be element [0, 1] of "
            "'model.layers.0.self_attn.o_proj.weight'"
        },
    ),
    "kv heads saved twice": Fault(
        "llama, one kv head",
        plants.kv_heads_saved_twice,
        {
            "layout_agrees": "the layout claims 'model.layers.0.self_attn.k_proj.weight' as [8, 16], in the file it is "
            "float32 [4, 16]",
            "checkpoint_roundtrip": "'model.layers.0.self_attn.k_proj.weight' is",
        },
    ),
    "q and gate rows read as two blocks": Fault(
        "qwen3_5",
        plants.query_and_gate_as_two_blocks,
        {
            "layout_agrees": "element [8, 0] of 'layers.1.qkv' is element [8, 0] of "
            "'model.layers.1.self_attn.q_proj.weight', it should be element [16, 0] of "
            "'model.layers.1.self_attn.q_proj.weight'"
        },
    ),
    "experts reversed": Fault(
        "qwen3_moe",
        plants.experts_reversed,
        {
            "layout_agrees": "element [0, 0, 0] of 'layers.0.expert_down' is element [0, 0] of "
            "'model.layers.0.mlp.experts.10.down_proj.weight', it should be element [0, 0] of "
            "'model.layers.0.mlp.experts.0.down_proj.weight'"
        },
    ),
    "experts sorted as text": Fault(
        "qwen3_moe",
        plants.experts_sorted_as_text,
        {
            "layout_agrees": "element [2, 0, 0] of 'layers.0.expert_down' is element [0, 0] of "
            "'model.layers.0.mlp.experts.10.down_proj.weight', it should be element [0, 0] of "
            "'model.layers.0.mlp.experts.2.down_proj.weight'"
        },
    ),
    "K1 a tied head as a second leaf": Fault(
        "llama, tied, with a head",
        plants.tied_head_as_a_second_leaf,
        {"layout_agrees": "the reference refuses what the layout takes: 'lm_head.weight' is not the embedding"},
    ),
    "a tied head that is not compared": Fault(
        "llama, tied, with a head",
        plants.tied_head_that_is_not_compared,
        {
            "iso_roundtrip": "forward, element [0, 0] of 'lm_head.weight' arrives nowhere, whatever its value: it is lost"
        },
    ),
    "K4 a head that the file has not": Fault(
        "llama, tied",
        plants.head_that_the_file_has_not,
        {
            "layout_agrees": "the layout claims 'lm_head.weight', which is not in the file",
            "checkpoint_roundtrip": "'lm_head.weight' is missing",
        },
    ),
    "padding rows kept in the file": Fault(
        "llama",
        plants.padded_vocabulary_in_the_file,
        {
            "layout_agrees": "the layout claims 'model.embed_tokens.weight' as [24, 16], in the file it is",
            "checkpoint_roundtrip": "'model.embed_tokens.weight' is",
        },
    ),
    "a cast to bfloat16 in the layout": Fault(
        "qwen3_5",
        plants.cast_in_the_layout,
        {
            "iso_roundtrip": "bits that went there and back: element [0] of 'model.layers.0.linear_attn.A_log' has other bits",
            "checkpoint_roundtrip": "element [0] of 'model.layers.0.linear_attn.A_log' has other bits",
        },
    ),
    "biases of k and v swapped": Fault(
        "qwen2",
        plants.biases_of_k_and_v_swapped,
        {
            "layout_agrees": "element [16] of 'layers.0.qkv_bias' is element [0] of "
            "'model.layers.0.self_attn.v_proj.bias', it should be element [0] of 'model.layers.0.self_attn.k_proj.bias'"
        },
    ),
    "a layer's index off by one": Fault(
        "qwen3",
        plants.layer_off_by_one,
        {
            "layout_agrees": "element [0] of 'layers.0.mlp_norm' is element [0] of "
            "'model.layers.2.post_attention_layernorm.weight', it should be element [0] of "
            "'model.layers.0.post_attention_layernorm.weight'"
        },
    ),
    "the last layer not read": Fault(
        "qwen3",
        plants.layer_missing,
        {
            "layout_agrees": "'model.layers.2.input_layernorm.weight' is in the file, and the layout does not claim it",
            "checkpoint_roundtrip": "'model.layers.2.input_layernorm.weight' is not declared",
        },
    ),
    "a tensor dropped": Fault(
        "qwen3",
        plants.tensor_not_claimed,
        {
            "layout_agrees": "'model.layers.0.self_attn.q_norm.weight' is in the file, and the layout does not claim it",
            "checkpoint_roundtrip": "'model.layers.0.self_attn.q_norm.weight' is not declared",
        },
    ),
    "a row-parallel bias counted per rank": Fault(
        "llama",
        plants.bias_summed_over_ranks,
        {
            "shards_agree": "forward and back, a number that stands nowhere stands where element [0] of "
            "'layers.0.o_bias' was",
            "checkpoint_roundtrip": "1 file: loaded and saved: element [",
        },
        ranks=2,
    ),
    "copies of a kv head that are not compared": Fault(
        "llama, one kv head",
        plants.kv_copies_not_compared,
        {
            "shards_agree": "backward, element [4, 0] of '0/layers.0.qkv' arrives nowhere, whatever its value: it is lost",
        },
        ranks=4,
    ),
    "kv heads dealt in turn": Fault(
        "qwen3",
        plants.kv_heads_dealt_in_turn,
        {
            "shards_agree": "element [6, 0] of '1/layers.0.qkv' is element [30, 0] of 'layers.0.qkv', "
            "it should be element [24, 0] of 'layers.0.qkv'"
        },
        ranks=4,
    ),
    "gate and up cut as one block": Fault(
        "llama",
        plants.fused_leaf_cut_as_one_block,
        {
            "shards_agree": "element [12, 0] of '0/layers.0.gate_up' is element [12, 0] of 'layers.0.gate_up', "
            "it should be element [24, 0] of 'layers.0.gate_up'"
        },
        ranks=2,
    ),
    "q, k, v channels cut as one block": Fault(
        "qwen3_5",
        plants.channels_cut_as_one_block,
        {
            "shards_agree": "element [5, 0] of '0/layers.0.conv' is element [5, 0] of 'layers.0.conv', "
            "it should be element [10, 0] of 'layers.0.conv'"
        },
        ranks=2,
    ),
    "padding that is not looked at": Fault(
        "llama",
        plants.padding_not_looked_at,
        {
            "shards_agree": "backward, element [4, 0] of '3/embed' arrives nowhere, whatever its value: it is lost",
        },
        ranks=4,
    ),
    "a row-parallel matrix cut by rows": Fault(
        "llama",
        plants.row_parallel_matrix_cut_by_rows,
        {"shards_agree": "'0/layers.0.down' is [8, 24], it should be [16, 12]"},
        ranks=2,
    ),
}


def verdicts(model: Model, iso: Iso, ranks: int) -> dict[str, str]:
    """What each law says that does not hold."""
    if ranks:
        whole = model.layout >> iso
        tried: dict[str, Callable[[], Any]] = {
            "shards_agree": lambda: laws.shards_agree(iso, lambda t, rank: model.held(t, rank, ranks), ranks),
            "checkpoint_roundtrip": lambda: laws.checkpoint_roundtrip(whole, state=model.state),
        }
    else:
        tried = {
            "iso_roundtrip": lambda: laws.iso_roundtrip(iso),
            "layout_agrees": lambda: laws.layout_agrees(iso, model.leaves, file=model.file),
            "checkpoint_roundtrip": lambda: laws.checkpoint_roundtrip(iso, state=model.state),
        }
    found = {}
    for name, law in tried.items():
        try:
            law()
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    fault = FAULTS[name]
    model = MODELS[fault.model]
    iso = fault.plant(model, fault.ranks) if fault.ranks else fault.plant(model)
    found = verdicts(model, iso, fault.ranks)
    assert found.keys() == fault.caught.keys(), found
    for law, sentence in fault.caught.items():
        assert re.search(re.escape(sentence), found[law]), found[law]
        assert "\n" not in found[law]


@pytest.mark.parametrize("name", MODELS)
def test_without_a_fault_every_law_holds(name: str) -> None:
    model = MODELS[name]
    assert verdicts(model, model.layout, 0) == {}
    assert laws.checkpoint_roundtrip(model.layout, placements=model.placements, ranks=(1, 2, 4)) == (1, 2, 4)
    for ranks in (2, 4):
        assert verdicts(model, model.placed(ranks), ranks) == {}


def test_every_model_has_a_fault() -> None:
    assert {fault.model for fault in FAULTS.values()} == set(MODELS)
