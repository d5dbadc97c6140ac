"""What the Hugging Face configurations of the dense decoders have in common, read into arguments and written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.errors import ModelError
from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.fields import Fields
from areno_fn.models.rope_fields import rope_from_hf, rope_to_hf

DESCRIPTIVE = (
    # what stands beside the function: provenance, storage, special tokens, reporting
    "transformers_version", "transformers.js_config", "name_or_path", "unsloth_version", "unsloth_fixed",
    "torch_dtype", "dtype", "use_bfloat16", "use_cache", "torchscript", "tf_legacy_loss", "attn_implementation",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "tokenizer_class", "tokenizer_padding_side", "tokenizer_model_max_length", "model_max_length", "max_sequence_length",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "prefix", "is_decoder",
    "output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward",
    # how transformers 4 generates text
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip
"""Fields that change nothing about the logits of a sequence."""


def read_decoder(
    fields: Fields, family: str, *, positions: int, head_dim: int | None = None, kv_heads: bool = False
) -> dict[str, Any]:
    """Reads the common fields and refuses what no dense decoder here supports.

    Args:
        fields: the configuration.
        family: what `model_type` has to be when it is given.
        positions: `max_position_embeddings` when it is not given.
        head_dim: `head_dim` when it is not given; None stands for hidden size / heads.
        kv_heads: the number of key heads has to be given; otherwise it defaults to the number of heads.

    Returns:
        Arguments of `DecoderConfig`.

    Raises:
        ModelError: names the field.
    """
    _refuse_other_functions(fields, family)
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, length = fields.integer("num_hidden_layers"), fields.integer("max_position_embeddings", default=positions)
    shared = fields.integer("num_key_value_heads") if kv_heads else fields.integer("num_key_value_heads", default=heads)
    if heads % shared:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}")
    channels = fields.integer("head_dim", default=head_dim)
    if channels is None and width % heads:
        raise fields.error(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}, and head_dim is missing"
        )
    channels = channels or width // heads
    if channels % 2:
        raise fields.error(f"head_dim must be even for rotary pairs, received {channels}")
    _refuse_other_layers(fields, layers)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": width,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": shared,
        "head_dim": channels,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6, above=0),
        "rope": rope_from_hf(fields, length),
        "tie_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "max_positions": length,
        "initializer_range": fields.number("initializer_range", default=0.02, least=0),
    }


def _refuse_other_functions(fields: Fields, family: str) -> None:
    fields.skip(DESCRIPTIVE)
    fields.expect("model_type", family)
    for name in fields.strings("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise fields.error(f"architectures has {name!r}, but only causal language models are supported")
    fields.expect("hidden_act", "silu")
    fields.expect("attention_dropout", 0.0, 0)
    fields.expect("quantization_config")
    fields.expect("auto_map")
    fields.expect("pruned_heads", {})
    fields.expect("is_causal", True)
    fields.expect("partial_rotary_factor", 1.0, 1)
    for name in ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "rope_interleaved", "use_mrope"):
        fields.expect(name, False)
    fields.expect("cross_attention_hidden_size")


def _refuse_other_layers(fields: Fields, layers: int) -> None:
    """Layers of another kind than full attention."""
    types = fields.strings("layer_types")
    if types is not None and len(types) != layers:
        raise fields.error(f"layer_types has {len(types)} entries, but num_hidden_layers is {layers}")
    for i, kind in enumerate(types or ()):
        if kind != "full_attention":
            raise fields.error(f"layer_types[{i}] is {kind!r}, but only 'full_attention' is supported")


def refuse_sliding_window(fields: Fields, layers: int) -> None:
    """The window of qwen2 and qwen3: where `layer_types` is silent, it begins at layer `max_window_layers` if it is on.

    Raises:
        ModelError: some layer would have a window.
    """
    used = fields.boolean("use_sliding_window", default=False)
    window = fields.integer("sliding_window", default=None)
    first = fields.integer("max_window_layers", default=28, least=0)
    if used and window is not None and first < layers and fields.strings("layer_types") is None:
        raise fields.error(f"use_sliding_window is true from layer {first} on, but sliding windows are not supported")


def write_decoder(config: DecoderConfig, family: str, architecture: str, dtype: str) -> dict[str, Any]:
    """The common fields of a transformers 5 `config.json`; special tokens are left to the caller."""
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "model_type": family,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_to_hf(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def readable(
    written: dict[str, Any], config: DecoderConfig, read: Callable[[Mapping[str, Any]], DecoderConfig]
) -> dict[str, Any]:
    """`written`, provided that it is read back as `config`.

    Raises:
        ModelError: the family's configuration has no field for something in `config`.
    """
    back = read(written)
    for field in attrs.fields(DecoderConfig):
        wanted, got = getattr(config, field.name), getattr(back, field.name)
        if wanted != got:
            raise ModelError(
                f"a {written['model_type']} configuration cannot say {field.name} = {wanted}; it says {got}"
            )
    return written
