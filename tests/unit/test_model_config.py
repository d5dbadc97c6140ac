"""What is read from Hugging Face configurations, what is refused by name, and how parameters start."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.models import FAMILIES, family_of
from areno_fn.models.decoder import DecoderConfig, init, shapes
from areno_fn.models.rope import Rope

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {"SmolLM2": SMOLLM2, "Llama 3.2": LLAMA32, "Qwen 2.5": QWEN25, "Qwen 3": QWEN3}


def read(hf: dict[str, Any]) -> DecoderConfig:
    config: DecoderConfig = family_of(hf).config_from_hf(hf)
    return config


def test_published_configurations_are_read() -> None:
    assert read(SMOLLM2) == DecoderConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, rms_norm_eps=1e-5, rope=Rope(theta=1e5), tie_embeddings=True, max_positions=8192,
        initializer_range=0.041666666666666664,
    )  # fmt: skip
    assert read(LLAMA32).rope == Rope(
        type="llama3", theta=5e5, factor=32.0, original_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    qwen2, qwen3 = read(QWEN25), read(QWEN3)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm, qwen2.head_dim) == (
        True,
        False,
        False,
        False,
        64,
    )
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm, qwen3.head_dim) == (
        False,
        False,
        False,
        True,
        128,
    )


def test_biases_and_head_dims_follow_the_family() -> None:
    biased = read({**LLAMA32, "attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    biased = read({**QWEN3, "attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)
    assert read({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128
    assert read({k: v for k, v in LLAMA32.items() if k != "num_key_value_heads"}).num_kv_heads == 32
    small = FAMILIES["qwen3"].config_from_hf(
        {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2}
    )  # fmt: skip
    assert (small.head_dim, small.max_positions, small.rms_norm_eps, small.rope.theta) == (128, 32768, 1e-6, 1e4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_back(name: str) -> None:
    config, family = read(PUBLISHED[name]), family_of(PUBLISHED[name])
    written = family.config_to_hf(config, "bfloat16")
    assert read(written) == config
    assert hash(read(written)) == hash(config)
    assert (written["model_type"], written["dtype"]) == (family.name, "bfloat16")
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & set(written)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (LLAMA32, {"hidden_act": "gelu"}, "llama configuration: hidden_act is 'gelu', which is not supported"),
        (LLAMA32, {"pretraining_tp": 2}, "pretraining_tp is 2, which is not supported; it can only be 1"),
        (LLAMA32, {"attention_dropout": 0.1}, "attention_dropout is 0.1, which is not supported"),
        (LLAMA32, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config is {'bits': 4, "),
        (LLAMA32, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map is"),
        (LLAMA32, {"architectures": ["LlamaForSequenceClassification"]}, "architectures has 'LlamaForSequenceClassification'"),
        (LLAMA32, {"architectures": "LlamaForCausalLM"}, "architectures must be a list of text"),
        (LLAMA32, {"rope_interleaved": True}, "rope_interleaved is True"),
        (LLAMA32, {"is_causal": False}, "is_causal is False"),
        (LLAMA32, {"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        (LLAMA32, {"sliding_window": 4096}, "sliding_window is 4096"),
        (LLAMA32, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA32, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        (LLAMA32, {"residual_multiplier": 0.2}, "the field 'residual_multiplier' is unknown"),
        (LLAMA32, {"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        (LLAMA32, {"head_dim": None, "num_attention_heads": 24}, "hidden_size 2048 is not a multiple of num_attention_heads 24"),
        (LLAMA32, {"head_dim": 63}, "head_dim must be even for rotary pairs, received 63"),
        (LLAMA32, {"vocab_size": None}, "vocab_size is missing"),
        (LLAMA32, {"hidden_size": "2048"}, "hidden_size must be an integer of at least 1, received '2048'"),
        (LLAMA32, {"num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1, received True"),
        (LLAMA32, {"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, received 0"),
        (LLAMA32, {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number, received '1e-6'"),
        (LLAMA32, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, received nan"),
        (LLAMA32, {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, received 1"),
        (LLAMA32, {"mlp_bias": "no"}, "mlp_bias must be true or false, received 'no'"),
        (QWEN25, {"use_sliding_window": True}, "use_sliding_window is true from layer 21 on"),
        (QWEN25, {"use_mrope": True}, "use_mrope is True"),
        (QWEN25, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (QWEN25, {"mlp_bias": True}, "the field 'mlp_bias' is unknown"),
        (QWEN25, {"layer_types": ["full_attention"] * 23}, "layer_types has 23 entries, but num_hidden_layers is 24"),
        (QWEN3, {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types[27] is 'sliding_attention'"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "from layer 0 on"),
        (QWEN3, {"num_experts": 8}, "qwen3 configuration: the field 'num_experts' is unknown"),
        (QWEN3, {"block_size": 8}, "the field 'block_size' is unknown"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(base: dict[str, Any], change: dict[str, Any], words: str) -> None:
    read(base)
    with pytest.raises(ModelError) as refusal:
        read({**base, **change})
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_is_either_checked_or_known_to_be_without_effect(name: str) -> None:
    """A value that makes no sense is refused wherever it could change the function."""
    without_effect = {
        "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
        "transformers.js_config",
    }  # fmt: skip
    base = PUBLISHED[name]
    for field in base:
        if field in without_effect:
            assert read({**base, field: "nonsense"}) == read(base)
        else:
            with pytest.raises(ModelError, match=field):
                read({**base, field: {"nonsense": 1} if field.startswith("rope_s") else "nonsense"})


@given(field=st.text(min_size=1).filter(lambda s: s[0] != "_"), value=st.none() | st.integers() | st.text())
def test_an_unknown_field_is_never_ignored(field: str, value: Any) -> None:
    if field in QWEN3:
        return
    with pytest.raises(ModelError):
        read({**QWEN3, f"x-{field}": value})
    assert read({**QWEN3, f"_{field}": value}) == read(QWEN3)


def test_windows_that_no_layer_uses_are_read() -> None:
    assert read({**QWEN25, "use_sliding_window": True, "max_window_layers": 24}) == read(QWEN25)
    assert read({**QWEN25, "use_sliding_window": True, "sliding_window": None}) == read(QWEN25)
    assert read({**QWEN25, "use_sliding_window": True, "layer_types": ["full_attention"] * 24}) == read(QWEN25)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"qk_norm": True}, "a llama configuration cannot say qk_norm = True; it says False"),
        ("llama", {"qkv_bias": True}, "a llama configuration cannot say o_bias = False; it says True"),
        ("qwen2", {"qkv_bias": False}, "a qwen2 configuration cannot say qkv_bias = False; it says True"),
        (
            "qwen3",
            {"qk_norm": True, "mlp_bias": True},
            "a qwen3 configuration cannot say mlp_bias = True; it says False",
        ),
    ],
)
def test_what_a_family_cannot_say_is_not_written(family: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as refusal:
        FAMILIES[family].config_to_hf(attrs.evolve(read(SMOLLM2), **change))
    assert words in str(refusal.value)


def test_families_are_found_by_model_type() -> None:
    assert [name for name, family in FAMILIES.items() if family.name != name] == []
    assert family_of(QWEN3) is FAMILIES["qwen3"]
    for name in ("gpt2", None):
        with pytest.raises(
            ModelError, match=f"model_type is {name!r}, but the families known here are llama, qwen2, qwen3"
        ):
            family_of({"model_type": name})
    with pytest.raises(ModelError, match="model_type is 'qwen3', which is not supported; it can only be 'llama'"):
        FAMILIES["llama"].config_from_hf({**LLAMA32, "model_type": "qwen3"})


TINY = DecoderConfig(
    vocab_size=300, hidden_size=64, intermediate_size=80, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, initializer_range=0.05,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be at least 1, received 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_not_built(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        attrs.evolve(TINY, **change)


def test_parameters_start_as_their_kind_asks() -> None:
    params = init(TINY, Key.of(7))
    assert len(params.layers) == 2
    for path, leaf in tree.leaves_with_path(params):
        if leaf.ndim == 2:
            assert leaf.std().item() == pytest.approx(0.05, rel=0.05), path
            assert abs(leaf.mean().item()) < 0.05 * 5 / leaf.numel() ** 0.5, path
        else:
            assert torch.all(leaf == (0.0 if path.endswith("_bias") else 1.0)), path
    matrices = [leaf.flatten()[:64] for leaf in tree.leaves(params) if leaf.ndim == 2]
    assert len({tuple(m.tolist()) for m in matrices}) == len(matrices)  # no two leaves share their numbers


def test_initial_numbers_are_functions_of_key_path_row_and_column() -> None:
    params = init(TINY, Key.of(7))
    assert tree.equal(params, init(TINY, Key.of(7)))
    assert not torch.equal(params.embed, init(TINY, Key.of(8)).embed)
    larger = init(attrs.evolve(TINY, num_layers=3, vocab_size=400), Key.of(7))
    assert tree.equal(larger.layers[:2], params.layers)
    assert torch.equal(larger.embed[:300], params.embed)
    assert torch.equal(init(TINY, Key.of(7), torch.bfloat16).embed, params.embed.bfloat16())


def test_large_matrices_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = init(TINY, Key.of(7))
    monkeypatch.setattr("areno_fn.models.decoder._BLOCK", 500)
    assert tree.equal(init(TINY, Key.of(7)), whole)


def test_shapes_say_what_init_makes_without_making_it() -> None:
    huge = attrs.evolve(TINY, vocab_size=10**7, hidden_size=10**5, num_layers=3, tie_embeddings=True)
    assert all(leaf.is_meta for leaf in tree.leaves(shapes(huge)))
    assert shapes(huge).head is None
    for dtype in (torch.float32, torch.bfloat16):
        made, meta = init(TINY, Key.of(0), dtype), init(TINY, Key.of(0), dtype, "meta")
        assert [(p, x.shape, x.dtype) for p, x in tree.leaves_with_path(made)] == [
            (p, x.shape, x.dtype) for p, x in tree.leaves_with_path(meta)
        ]
        assert all(leaf.is_meta for leaf in tree.leaves(meta))


def test_parameters_have_the_documented_shapes() -> None:
    layer = shapes(TINY).layers[0]
    found = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(layer)}
    assert found == {
        "attn_norm": (64,), "qkv": (128, 64), "qkv_bias": (128,), "q_norm": (16,), "k_norm": (16,), "o": (64, 64),
        "o_bias": (64,), "mlp_norm": (64,), "gate_up": (160, 64), "gate_up_bias": (160,), "down": (64, 80),
        "down_bias": (64,),
    }  # fmt: skip
    bare = shapes(read(QWEN3)).layers[0]
    absent = [n for n in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias", "q_norm") if getattr(bare, n) is None]
    assert absent == ["qkv_bias", "o_bias", "gate_up_bias", "down_bias"]


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"])
def test_sizes_that_no_memory_holds(name: str) -> None:
    with pytest.raises(
        ModelError, match="weights, which fits in no memory|(num_hidden_layers|vocab_size) must be at most"
    ):
        read(QWEN3 | {name: 2**62})


@pytest.mark.parametrize("name", [None, ["qwen3"], {}, 3, "gpt2"])
def test_a_model_type_that_is_none(name: Any) -> None:
    with pytest.raises(ModelError, match="model_type is .*, but the families known here are llama, qwen2, qwen3"):
        family_of({"model_type": name})
