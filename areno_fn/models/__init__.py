"""Model families: `FAMILIES` is the one place where a family is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.models import decoder, decoder_policy
from areno_fn.models.llama import checkpoint as llama_checkpoint
from areno_fn.models.llama import model as llama
from areno_fn.models.qwen2 import checkpoint as qwen2_checkpoint
from areno_fn.models.qwen2 import model as qwen2
from areno_fn.models.qwen3 import checkpoint as qwen3_checkpoint
from areno_fn.models.qwen3 import model as qwen3

__all__ = ["FAMILIES", "Family", "family_of"]


@attrs.frozen(kw_only=True)
class Family:
    """Everything the rest of the library asks of a kind of model.

    Attributes:
        name: the `model_type` of Hugging Face.
        config_from_hf: reads a Hugging Face configuration, refusing what is not supported.
        config_to_hf: `(config, dtype="float32")` writes one for a model that came from none.
        init: `(config, key, dtype=..., device=...)` makes random parameters.
        shapes: `(config, dtype=...)` makes the same tree of meta tensors.
        policy: the functions of the model with its configuration filled in.
        layout: `(config, head_in_file=...)` maps the tensors of a Hugging Face folder to the parameter tree.
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_to_hf: Callable[..., dict[str, Any]]
    init: Callable[..., Any]
    shapes: Callable[..., Any]
    policy: Callable[[Any], TokenPolicy]
    layout: Callable[..., Iso]


def _dense(name: str, model: Any, checkpoint: Any) -> Family:
    return Family(
        name=name,
        config_from_hf=model.config_from_hf,
        config_to_hf=model.config_to_hf,
        init=decoder.init,
        shapes=decoder.shapes,
        policy=decoder_policy.DecoderPolicy,
        layout=checkpoint.layout,
    )


FAMILIES: dict[str, Family] = {
    "llama": _dense("llama", llama, llama_checkpoint),
    "qwen2": _dense("qwen2", qwen2, qwen2_checkpoint),
    "qwen3": _dense("qwen3", qwen3, qwen3_checkpoint),
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that the `model_type` of a Hugging Face configuration names.

    Raises:
        ModelError: there is no `model_type`, or no such family here.
    """
    name = hf_config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"model_type is {name!r}, but the families known here are {', '.join(FAMILIES)}")
    return FAMILIES[name]
