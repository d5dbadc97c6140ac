"""The file that diffusers' `load_lora_weights` reads: an adapter of one part of a pipeline.

Keys begin with the part, as `transformer.blocks.0.to_q.lora_A.weight`. Ranks and alphas stand in the metadata of the
file, under `lora_adapter_metadata`, as JSON whose names begin with the part too; without them diffusers takes the scale to be 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs

from areno_fn.ckpt.header import Header
from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.peft_config import AdapterConfig, config_from_json, config_to_json
from areno_fn.contracts.errors import CheckpointError

DIFFUSERS = "pytorch_lora_weights.safetensors"
"""The name that diffusers looks for first."""

LOADED_INTO = "transformer"
"""What keys begin with of whichever transformer: diffusers loads the file of a second one with load_into_transformer_2."""

_SAID = "lora_adapter_metadata"
_PEFT = "base_model.model."


def diffusers_key(key: str, part: str) -> str:
    """The key of a matrix in diffusers' file, from the one that PEFT gives it."""
    return f"{part}.{key.removeprefix(_PEFT)}"


def diffusers_metadata(config: AdapterConfig, part: str) -> dict[str, str]:
    """The metadata of diffusers' file; `as_peft` is the inverse."""
    values = {f"{part}.{name}": value for name, value in config_to_json(config).items()}
    return {"format": "pt", _SAID: json.dumps(values, indent=2, sort_keys=True)}


def as_peft(header: Header) -> tuple[AdapterConfig, Header]:
    """The configuration of diffusers' file, and its header with the keys that PEFT gives the matrices.

    Raises:
        CheckpointError: it says nothing of ranks and alphas, is of several parts of a pipeline, or says something that cannot be
            used.
    """
    if _SAID not in header.metadata:
        raise CheckpointError(
            f"{header.path} has no {_SAID} in its metadata, so that the scale of the adapter is not known; save it with "
            f"transformer_lora_adapter_metadata of diffusers' save_lora_weights"
        )
    values = strict_json(header.metadata[_SAID].encode(), f"{header.path}: {_SAID}")
    if not isinstance(values, dict):
        raise CheckpointError(f"{header.path}: {_SAID} is a JSON {type(values).__name__}, it must be an object")
    parts = {name.partition(".")[0] for name in (*values, *header.entries)}
    if len(parts) != 1:
        raise CheckpointError(
            f"{header.path} adapts {', '.join(sorted(parts)) or 'nothing'}; an adapter of one part of a pipeline is needed"
        )
    (part,) = parts
    entries = {f"{_PEFT}{key.removeprefix(f'{part}.')}": entry for key, entry in header.entries.items()}
    return _config(values, part, header), attrs.evolve(header, entries=entries)


def _config(values: Mapping[str, object], part: str, header: Header) -> AdapterConfig:
    own = {name.removeprefix(f"{part}."): value for name, value in values.items()}
    return config_from_json(own, f"{header.path}: {_SAID}")
