"""Rollouts whose log-probabilities are those of training bit for bit: who may ask for them, and the policy that gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.policy import Consistent
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.model import ModelPlan

_LOW = (torch.bfloat16, torch.float16)
_WIDEST, _EVEN = 128, 8
_COMPARED = (9, 0)
"""The GPUs whose tensor cores were seen to add up alike with one row and with many."""


def consistent(spec: RunSpec, model: ModelPlan, device: torch.device) -> ModelPlan:
    """The model with a policy of the consistency that is asked for.

    Raises:
        SpecError: the device, the family, the dtype or the heads do not allow it.
    """
    if spec.consistency == "ordinary":
        return model
    if device.type != "cuda":
        raise SpecError(
            "consistency: 'bitwise' is for a GPU, where products depend on the shape of a batch; on the CPU 'ordinary' gives equal "
            "bits already wherever the BLAS adds up rows alike; use device = 'cuda', or remove this"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability != _COMPARED:
        raise SpecError(
            f"consistency: 'bitwise' was compared on GPUs of compute capability {_shown(_COMPARED)} alone, and this one has "
            f"{_shown(capability)}; remove this"
        )
    if not isinstance(model.policy, Consistent):
        raise SpecError(f"consistency: {model.family.name} has ordinary kernels only; remove 'bitwise'")
    size = model.config.head_dim
    if size > _WIDEST or size % _EVEN:
        raise SpecError(
            f"consistency: 'bitwise' takes heads of at most {_WIDEST} channels in eights, but the model's have {size}; remove this"
        )
    dtypes = {leaf.dtype for leaf in _matrices(model.shapes())}
    if len(dtypes) > 1 or not dtypes <= set(_LOW):
        shown = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise SpecError(
            f"consistency: 'bitwise' is for parameters in bfloat16 or float16, but the model's are {shown}; "
            "set model.dtype = 'bfloat16'"
        )
    policy: Any = model.policy
    return attrs.evolve(model, policy=attrs.evolve(policy, consistency="bitwise"))


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _matrices(shapes: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree.leaves(shapes) if leaf.ndim > 1)
