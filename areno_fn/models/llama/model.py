"""llama: grouped attention, biases on all attention projections or none, rotary angles with llama3 spacing or others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.decoder_fields import read_decoder, readable, write_decoder
from areno_fn.models.fields import Fields


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face configuration with `model_type` llama.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    fields = Fields(hf, "llama configuration")
    common = read_decoder(fields, "llama", positions=2048)
    bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    fields.expect("pretraining_tp", 1)
    fields.expect("is_llama_config", True)
    fields.expect("sliding_window")
    fields.finish()
    return DecoderConfig(**common, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def config_to_hf(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The contents of a `config.json`; `config_from_hf` reads it back as `config`.

    Raises:
        ModelError: `config` has something that llama has not.
    """
    written = write_decoder(config, "llama", "LlamaForCausalLM", dtype)
    written |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias, "pretraining_tp": 1}
    return readable(written, config, config_from_hf)
