"""Clipping by the norm of the whole gradient."""

from __future__ import annotations

import math
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.record import record
from areno_fn.steps.reduce import wide
from areno_fn.steps.scaling import scaled


@record
class ClipByGlobalNormState:
    """The norm before clipping, float32 [], kept to be reported."""

    norm: torch.Tensor

    def report(self) -> dict[str, torch.Tensor]:
        """The norm of the latest gradient."""
        return {"grad_norm": self.norm}


def global_norm(gradient: Any) -> torch.Tensor:
    """The Euclidean norm of all leaves together, in float32 (float64 for float64 leaves), []."""
    leaves = tree.leaves(gradient)
    if any(leaf.dtype == torch.float64 for leaf in leaves):
        norms = torch._foreach_norm([wide(leaf) for leaf in leaves])
    else:
        norms = torch._foreach_norm(leaves, 2, torch.float32)  # which makes no copy of them in float32
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """min(1, limit / (norm + 1e-6)), []; for a limit of infinity exactly 1, whatever the norm."""
    if limit == math.inf:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clipping(limit: float) -> Transform:
    """`clip_by_global_norm` as a specification says it: 0 does not clip."""
    return clip_by_global_norm(limit or math.inf)


def clip_by_global_norm(limit: float) -> Transform:
    """Scales the whole gradient by min(1, limit / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    The norm is reported as grad_norm. A limit of infinity leaves the gradient as it is and still reports. The norm of
    finite numbers may lie beyond float32 and then is infinity; under a finite limit that makes them 0.

    Raises:
        SpecError: the limit is not above 0.
    """
    if not limit > 0:
        raise SpecError(
            f"clip_by_global_norm needs a limit above 0, not {limit}; use math.inf to report the norm alone"
        )

    def init(params: Any) -> ClipByGlobalNormState:
        return ClipByGlobalNormState(norm=torch.zeros((), device=tree.leaves(params)[0].device))

    def update(updates: Any, state: ClipByGlobalNormState, params: Any) -> tuple[Any, ClipByGlobalNormState]:
        del state, params
        norm = global_norm(updates)
        clipped = tree.unflatten(updates, scaled(tree.leaves(updates), clip_factor(norm, limit)))
        return clipped, ClipByGlobalNormState(norm=norm.float())

    return Transform(init=init, update=update)
