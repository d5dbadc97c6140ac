"""The flow-matching families: which tensors their transformers have, and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.models import flow_checkpoint, flux, flux2, ltx2, qwen_image, sd3, wan, z_image
from areno_fn.models.flow_checkpoint import Leaf
from areno_fn.models.flux import checkpoint as flux_checkpoint
from areno_fn.models.flux2 import checkpoint as flux2_checkpoint
from areno_fn.models.ltx2 import checkpoint as ltx2_checkpoint
from areno_fn.models.qwen_image import checkpoint as qwen_image_checkpoint
from areno_fn.models.sd3 import checkpoint as sd3_checkpoint
from areno_fn.models.wan import checkpoint as wan_checkpoint
from areno_fn.models.z_image import checkpoint as z_image_checkpoint


@attrs.frozen
class FlowFamily:
    """A family of transformers that diffusers stores.

    Attributes:
        name: its class in diffusers, which is `_class_name` in its config.json.
        config_from_hf: reads that file; raises `ModelError`.
        leaves: every tensor of the state dict of a configuration.
        tiny: small configurations by variant, as they would stand in config.json, for tests.
        left_out: patterns of tensors that files of the family may hold and its transformer does not take; reading
            leaves them out, writing passes them through.
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    leaves: Callable[[Any], Mapping[str, Leaf]]
    tiny: Callable[[], Mapping[str, Mapping[str, Any]]]
    left_out: tuple[str, ...] = ()

    def layout(self, config: Any) -> Iso:
        """From the tensors of a file to the leaves, which have the same names."""
        return flow_checkpoint.layout(self.leaves(config))

    def placements(self, config: Any) -> dict[str, Placement]:
        """How tensor-parallel ranks share each leaf; heads stay whole, so their number must be a multiple of the ranks."""
        return flow_checkpoint.placements(self.leaves(config))

    def buffers(self, config: Any) -> frozenset[str]:
        """The leaves that are stored but not parameters, so that nothing trains them."""
        return frozenset(name for name, leaf in self.leaves(config).items() if leaf.buffer)

    def parameters(self, config: Any) -> int:
        """The number of elements of all parameters."""
        return sum(leaf.spec.numel for leaf in self.leaves(config).values() if not leaf.buffer)


FLOW_LAYOUTS: dict[str, FlowFamily] = {
    "sd3": FlowFamily(sd3.CLASS, sd3.config_from_hf, sd3_checkpoint.leaves, sd3.tiny),
    "flux": FlowFamily(flux.CLASS, flux.config_from_hf, flux_checkpoint.leaves, flux.tiny),
    "flux2": FlowFamily(flux2.CLASS, flux2.config_from_hf, flux2_checkpoint.leaves, flux2.tiny),
    "qwen_image": FlowFamily(
        qwen_image.CLASS, qwen_image.config_from_hf, qwen_image_checkpoint.leaves, qwen_image.tiny
    ),
    "z_image": FlowFamily(z_image.CLASS, z_image.config_from_hf, z_image_checkpoint.leaves, z_image.tiny),
    "wan": FlowFamily(wan.CLASS, wan.config_from_hf, wan_checkpoint.leaves, wan.tiny, wan_checkpoint.LEFT_OUT),
    "ltx2": FlowFamily(ltx2.CLASS, ltx2.config_from_hf, ltx2_checkpoint.leaves, ltx2.tiny),
}
"""Every flow-matching family, by the name of its package."""
