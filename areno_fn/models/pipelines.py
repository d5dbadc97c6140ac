"""Families of diffusers' pipelines that can be trained: `PIPELINES` is the one place where such a family is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow_adapter import FlowAdapter, Pipeline, Setting
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.contracts.placement import Placement
from areno_fn.models import flow_checkpoint
from areno_fn.models.flow_checkpoint import Leaf
from areno_fn.models.flow_layouts import FLOW_LAYOUTS, FlowFamily
from areno_fn.models.flux import adapter as flux
from areno_fn.models.flux2 import adapter as flux2
from areno_fn.models.ltx2 import adapter as ltx2
from areno_fn.models.qwen_image import adapter as qwen_image
from areno_fn.models.sd3 import adapter as sd3
from areno_fn.models.wan import adapter as wan
from areno_fn.models.z_image import adapter as z_image


@attrs.frozen(kw_only=True)
class PipelineFamily:
    """Everything the rest of the library asks of a family of pipelines.

    Where a function takes `configs`, these are the configurations of the transformers of a checkpoint, by component.

    Attributes:
        name: by which messages call it; its layout has the same in `FLOW_LAYOUTS`.
        pipelines: the classes of diffusers' pipelines that it covers.
        contract: what a checkpoint takes and makes, from its configurations alone.
        adapter: the functions of a checkpoint, at one size.
    """

    name: str
    pipelines: tuple[str, ...]
    contract: Callable[[Pipeline], PipelineIOContract]
    adapter: Callable[[Pipeline, Setting], FlowAdapter]

    @property
    def transformer(self) -> FlowFamily:
        """What a transformer of the family has in its file."""
        return FLOW_LAYOUTS[self.name]

    def layout(self, configs: Mapping[str, Any]) -> Iso:
        """From the tensors of all files to the leaves, both of which are called alike."""
        return flow_checkpoint.layout(self._leaves(configs))

    def placements(self, configs: Mapping[str, Any]) -> Mapping[str, Placement]:
        """How ranks share each leaf, which also says what is fused in it."""
        return flow_checkpoint.placements(self._leaves(configs))

    def shapes(self, configs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The parameter tree as meta tensors."""
        leaves = self._leaves(configs)
        return {name: torch.empty(leaf.spec.shape, device="meta") for name, leaf in leaves.items()}

    def fixed(self, configs: Mapping[str, Any]) -> frozenset[str]:
        """The leaves that are stored but that nothing trains, such as tables of positions."""
        return frozenset(name for name, leaf in self._leaves(configs).items() if leaf.buffer)

    def _leaves(self, configs: Mapping[str, Any]) -> dict[str, Leaf]:
        before = prefixes(configs)
        every = ((before[part], self.transformer.leaves(config)) for part, config in configs.items())
        return {prefix + name: leaf for prefix, leaves in every for name, leaf in leaves.items()}


def prefixes(parts: Iterable[str]) -> dict[str, str]:
    """What the names of the leaves of each component begin with: nothing of an only one, else its own name."""
    names = tuple(parts)
    return {name: f"{name}." if len(names) > 1 else "" for name in names}


PIPELINES: dict[str, PipelineFamily] = {
    "flux": PipelineFamily(
        name="flux", pipelines=("FluxPipeline", "FluxKontextPipeline"), contract=flux.contract, adapter=flux.adapter
    ),
    "sd3": PipelineFamily(
        name="sd3", pipelines=("StableDiffusion3Pipeline",), contract=sd3.contract, adapter=sd3.adapter
    ),
    "flux2": PipelineFamily(
        name="flux2", pipelines=("Flux2Pipeline", "Flux2KleinPipeline"), contract=flux2.contract, adapter=flux2.adapter
    ),
    "qwen_image": PipelineFamily(
        name="qwen_image",
        pipelines=tuple(qwen_image.EDITIONS),
        contract=qwen_image.contract,
        adapter=qwen_image.adapter,
    ),
    "z_image": PipelineFamily(
        name="z_image", pipelines=("ZImagePipeline",), contract=z_image.contract, adapter=z_image.adapter
    ),
    "wan": PipelineFamily(
        name="wan",
        pipelines=("WanPipeline", wan.WITH_PICTURE, wan.WITH_VIDEO),
        contract=wan.contract,
        adapter=wan.adapter,
    ),
    "ltx2": PipelineFamily(name="ltx2", pipelines=("LTX2Pipeline",), contract=ltx2.contract, adapter=ltx2.adapter),
}


def pipeline_family(class_name: str) -> PipelineFamily:
    """The family that a class of diffusers' pipelines belongs to.

    Raises:
        ModelError: none of those that are known here.
    """
    for family in PIPELINES.values():
        if class_name in family.pipelines:
            return family
    known = ", ".join(name for family in PIPELINES.values() for name in family.pipelines)
    raise ModelError(f"_class_name in model_index.json is {class_name!r}, but the pipelines known here are {known}")
