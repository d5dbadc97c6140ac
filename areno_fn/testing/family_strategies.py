"""Hypothesis strategies for model families: tiny configurations, and the layouts of files that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.layouts import FAMILY_LAYOUTS, TokenLayout

Draw = Callable[..., Any]
Layout = tuple[Iso, Mapping[str, Placement]]


def families() -> tuple[str, ...]:
    """The names of all families that have a layout."""
    return (*(family.name for family in FAMILY_LAYOUTS), *FLOW_LAYOUTS)


@st.composite
def configs(draw: Draw, family: str) -> dict[str, Any]:
    """Tiny configurations of a family, as in a config.json: any sizes, tied or not, with and without biases.

    Args:
        family: its name, one of `families()`.

    Raises:
        ModelError: there is no such family.
    """
    if family in FLOW_LAYOUTS:
        return dict(draw(st.sampled_from(list(FLOW_LAYOUTS[family].tiny().values()))))
    return dict(_token_layout(family).random_config(lambda options: draw(st.sampled_from(list(options)))))


@st.composite
def layouts(draw: Draw, family: str) -> Layout:
    """The layout of a random file of a family, and how ranks share its leaves.

    The file has any of the forms that files of its configuration can have: with a head or without, with experts
    apart or packed, under either spelling of its names. Ranks share experts by their rows or deal them whole.

    Args:
        family: its name, one of `families()`.
    """
    config = draw(configs(family))
    if family in FLOW_LAYOUTS:
        flow = FLOW_LAYOUTS[family]
        read = flow.config_from_hf(config)
        return flow.layout(read), flow.placements(read)
    tokens = _token_layout(family)
    read = tokens.config_from_hf(config)
    names = draw(st.sampled_from(list(tokens.forms(read))))
    return tokens.layout(read, names), tokens.placements(read, names, whole_experts=draw(st.booleans()))


def _token_layout(name: str) -> TokenLayout:
    for family in FAMILY_LAYOUTS:
        if family.name == name:
            return family
    raise ModelError(f"there is no family {name!r}; those with a layout are {', '.join(families())}")
