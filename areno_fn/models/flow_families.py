"""Flow models that can be trained: `FLOW_FAMILIES` is the one place where such a family is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.models import digits_dit
from areno_fn.models.digits_dit import checkpoint as digits_dit_checkpoint
from areno_fn.models.digits_dit import model as digits_dit_model


@attrs.frozen(kw_only=True)
class FlowFamily:
    """Everything the rest of the library asks of a kind of flow model.

    Attributes:
        name: by which specifications call it.
        class_name: of its transformer in diffusers, the `_class_name` of its config.json.
        config_from_hf: reads that file, refusing what is not supported.
        config_to_hf: writes it.
        init: `(config, key, device=...)` makes random parameters.
        shapes: makes the same tree of meta tensors.
        policy: the functions of the model with its configuration filled in.
        layout: maps the tensors of a diffusers folder to the parameter tree.
        placements: how ranks share each leaf, which also says what is fused in it.
        classes: how many classes its conditions name.
    """

    name: str
    class_name: str
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_to_hf: Callable[[Any], dict[str, Any]]
    init: Callable[..., Any]
    shapes: Callable[[Any], Any]
    policy: Callable[[Any], FlowPolicy]
    layout: Callable[[Any], Iso]
    placements: Callable[[Any], Mapping[str, Placement]]
    classes: Callable[[Any], int]


FLOW_FAMILIES: dict[str, FlowFamily] = {
    "digits_dit": FlowFamily(
        name="digits_dit",
        class_name=digits_dit.CLASS,
        config_from_hf=digits_dit.config_from_hf,
        config_to_hf=digits_dit.config_to_hf,
        init=digits_dit_model.init,
        shapes=digits_dit_model.shapes,
        policy=digits_dit_model.DiTPolicy,
        layout=digits_dit_checkpoint.layout,
        placements=digits_dit_checkpoint.placements,
        classes=lambda config: config.num_classes,
    ),
}


def flow_family_of(hf_config: Mapping[str, Any]) -> FlowFamily | None:
    """The family whose transformer a config.json of diffusers describes; None where it describes none of these."""
    named = hf_config.get("_class_name")
    return next((family for family in FLOW_FAMILIES.values() if family.class_name == named), None)
