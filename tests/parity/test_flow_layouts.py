"""Layouts of flow-matching transformers against diffusers' own modules."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from flow_toys import PUBLISHED, VARIANTS, configs, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.contracts.layout import TensorSpec
from areno_fn.contracts.placement import Fused, Replicated, Split
from areno_fn.models.flow_layouts import FLOW_LAYOUTS

diffusers = pytest.importorskip("diffusers", reason="diffusers is needed to compare with: pip install 'areno-fn[test]'")

LARGE = (
    "Stable Diffusion 3.5 medium", "Flux.1 dev", "Flux.2 dev", "Qwen-Image", "Z-Image Turbo",
    "Wan 2.1 first and last frame to video 14B", "LTX-2.3",
)  # fmt: skip
PLANNED = ("flux", "flux2", "qwen_image")
"""The families for which diffusers says how ranks share the weights."""


def module(hf: Mapping[str, Any], device: str = "meta") -> torch.nn.Module:
    with torch.device(device):
        made: torch.nn.Module = getattr(diffusers, hf["_class_name"]).from_config(dict(hf))
    return made


def require_same_tensors(family: str, hf: Mapping[str, Any]) -> None:
    layouts, reference = FLOW_LAYOUTS[family], module(hf)
    config = layouts.config_from_hf(hf)
    expected = {name: TensorSpec(tuple(value.shape)) for name, value in reference.state_dict().items()}
    layout = layouts.layout(config)
    assert dict(layout.source) == expected
    assert dict(layout.target) == expected
    assert layouts.placements(config).keys() == expected.keys()
    assert layouts.buffers(config) == {name for name, _ in reference.named_buffers()} & expected.keys()
    assert layouts.parameters(config) == sum(value.numel() for value in reference.parameters())


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_every_variant_has_the_tensors_of_its_module(family: str, variant: str) -> None:
    require_same_tensors(family, tiny(family, variant))


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
@settings(settings.get_profile("layouts"))
@given(data=st.data())
def test_random_configurations_have_the_tensors_of_their_modules(family: str, data: st.DataObject) -> None:
    require_same_tensors(family, data.draw(configs(family)))


@pytest.mark.parametrize("name", LARGE)
def test_published_configurations_have_the_tensors_of_their_modules(name: str) -> None:
    published = PUBLISHED[name]
    require_same_tensors(published.family, published.hf)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_a_configuration_without_fields_means_the_defaults_of_diffusers(family: str) -> None:
    layouts = FLOW_LAYOUTS[family]
    parameters = inspect.signature(getattr(diffusers, layouts.name).__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    named = {"_class_name": layouts.name}
    assert layouts.config_from_hf(named | defaults) == layouts.config_from_hf(named)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_what_diffusers_writes_into_a_config_is_read(family: str) -> None:
    reference = module(next(iter(FLOW_LAYOUTS[family].tiny().values())))
    written = {**reference.config, "_class_name": FLOW_LAYOUTS[family].name, "_diffusers_version": "0.42.1"}
    config = FLOW_LAYOUTS[family].config_from_hf(written)
    assert FLOW_LAYOUTS[family].layout(config).source.keys() == reference.state_dict().keys()


@pytest.mark.parametrize(("family", "variant"), [row for row in VARIANTS if row[0] in PLANNED])
def test_ranks_share_the_weights_as_diffusers_plans(family: str, variant: str) -> None:
    hf = tiny(family, variant)
    reference = module(hf)
    config = FLOW_LAYOUTS[family].config_from_hf(hf)
    for name, placement in FLOW_LAYOUTS[family].placements(config).items():
        layer, _, kind = name.rpartition(".")
        plan = [style for pattern, style in reference._tp_plan.items() if fnmatch.fnmatchcase(layer, pattern)]
        planned = plan[0] if plan else "replicated"
        linear = reference.get_submodule(layer)
        if isinstance(placement, Replicated):
            assert planned == "replicated" or (kind == "bias" and _dim(planned) == 1), name
            continue
        assert placement.dim == _dim(planned), name
        assert _sizes(placement, linear) == _planned_sizes(planned, linear), name


def _dim(planned: Any) -> int:
    text = planned if isinstance(planned, str) else type(planned).__name__.lower()
    return {"colwise": 0, "packedcolwiseparallel": 0, "rowwise": 1, "packedrowwiseparallel": 1}[text]


def _length(linear: torch.nn.Module, dim: int) -> int:
    return linear.weight.shape[dim]


def _sizes(placement: Split | Fused, linear: torch.nn.Module) -> list[int]:
    if isinstance(placement, Split):
        return [_length(linear, placement.dim)]
    return [block.size for block in placement.blocks]


def _planned_sizes(planned: Any, linear: torch.nn.Module) -> list[int]:
    """What diffusers deals apart: ratios given with the plan, or sizes that stand on the layer."""
    dim = _dim(planned)
    if isinstance(planned, str):
        return [_length(linear, dim)]
    stored = "_tp_packed_col_blocks" if dim == 0 else "_tp_packed_row_blocks"
    ratios = planned.blocks if planned.blocks is not None else getattr(linear, stored)
    return [ratio * _length(linear, dim) // sum(ratios) for ratio in ratios]
