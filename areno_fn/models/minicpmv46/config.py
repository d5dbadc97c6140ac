"""minicpmv46: what its layout needs of a configuration. The text part is a qwen3_5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areno_fn.models.qwen3_5.config import Qwen35Shape, read
from areno_fn.models.text_fields import TextFields


def config_from_hf(hf: Mapping[str, Any]) -> Qwen35Shape:
    """Reads a Hugging Face configuration with `model_type` minicpmv4_6.

    Raises:
        ModelError: there is no `text_config`, or one of its fields is missing, of another type, or asks for what
            cannot be laid out.
    """
    text = TextFields(hf, "minicpmv4_6", "minicpmv4_6", "qwen3_5_text")
    if not text.nested:
        raise text.fields.error("text_config is missing, which holds the sizes of the language model")
    return read(text)
