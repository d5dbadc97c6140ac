"""qwen3: grouped attention, queries and keys normalised per head, biases on all attention projections or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.decoder_fields import read_decoder, readable, refuse_sliding_window, write_decoder
from areno_fn.models.fields import Fields


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face configuration with `model_type` qwen3.

    Raises:
        ModelError: a field that is missing, of another type, unknown, or that asks for what is not supported.
    """
    fields = Fields(hf, "qwen3 configuration")
    common = read_decoder(fields, "qwen3", positions=32768, head_dim=128, kv_heads=True)
    refuse_sliding_window(fields, common["num_layers"])
    bias = fields.boolean("attention_bias", default=False)
    fields.finish()
    return DecoderConfig(**common, qkv_bias=bias, o_bias=bias, qk_norm=True)


def config_to_hf(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The contents of a `config.json`; `config_from_hf` reads it back as `config`.

    Raises:
        ModelError: `config` has something that qwen3 has not.
    """
    written = write_decoder(config, "qwen3", "Qwen3ForCausalLM", dtype)
    written |= {"attention_bias": config.qkv_bias, "use_sliding_window": False}
    return readable(written, config, config_from_hf)
