"""Models with one number a token: how they begin, and their layout in a Hugging Face folder for classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso, TensorSpec, product, rename
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.record import replace
from areno_fn.contracts.valued import Valued
from areno_fn.models import Family, family_of

SCORE = "score.weight"
"""The file's name of the head, as transformers' models for sequence classification have it."""

TRUNK = "trunk"

_KIND = "ForSequenceClassification"
_LABELS = ("num_labels", "id2label", "label2id", "problem_type")


def config_from_hf(hf_config: Mapping[str, Any]) -> tuple[Family, Any]:
    """The family and configuration of a folder for sequence classification with one label.

    Raises:
        ModelError: it is of another kind, has several labels, or something unsupported.
    """
    named = hf_config.get("architectures") or []
    if not (isinstance(named, list) and named and all(str(name).endswith(_KIND) for name in named)):
        raise ModelError(f"architectures is {named!r}, but a model with one number a text is a ...{_KIND}")
    labels = hf_config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else hf_config.get("num_labels", 2)
    if count != 1:
        raise ModelError(f"the model has {count} labels, but one that gives a text one number has 1")
    family = family_of(hf_config)
    kept = {name: value for name, value in hf_config.items() if name not in ("architectures", *_LABELS)}
    return family, family.config_from_hf(kept)


def config_to_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the classification folder of a model, from that of its own."""
    named, *_ = hf_config.get("architectures") or [f"{hf_config['model_type'].capitalize()}ForCausalLM"]
    kind = str(named).removesuffix("ForCausalLM") + _KIND
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**hf_config, "architectures": [kind], **labels}


def shapes(family: Family, config: Any, dtype: torch.dtype = torch.float32) -> Valued:
    """The parameters as meta tensors."""
    trunk = family.shapes(headless(config), dtype=dtype)
    return Valued(trunk=trunk, head=torch.empty((1, config.hidden_size), dtype=dtype, device="meta"))


def begin(model: Any) -> Valued:
    """What values begin from: a copy of a model without its output matrix, and a head of zeros.

    Nothing is shared with `model`; every value is 0 until the head has moved.
    """
    trunk = tree.map(torch.clone, replace(model, head=None))
    return Valued(trunk=trunk, head=trunk.norm.new_zeros((1, trunk.norm.shape[0]), dtype=trunk.embed.dtype))


def layout(family: Family, config: Any) -> Iso:
    """From the tensors of a folder for sequence classification with one label to the leaves of a `Valued`."""
    trunk = family.layout(headless(config), head_in_file=False)
    below = product(rename(path, f"{TRUNK}.{path}", spec) for path, spec in trunk.target.items())
    return (trunk >> below) | rename(SCORE, "head", TensorSpec((1, config.hidden_size)))


def placements(own: dict[str, Placement]) -> dict[str, Placement]:
    """How ranks share the leaves of a `Valued`, from how they share those of its trunk."""
    return {f"{TRUNK}.{path}": placement for path, placement in own.items()}


def headless(config: Any) -> Any:
    """The configuration of a model whose folder has no output matrix: the embedding stands for it, and nothing asks it."""
    return attrs.evolve(config, tie_embeddings=True)
