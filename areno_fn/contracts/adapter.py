"""Adapters: low-rank changes that are trained beside a weight which stays as it is (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import record, shown, static


@record
class LowRank:
    """The adapter of one linear map: a change of its weight, scale * B A, of rank r at most.

    Attributes:
        a: [r, D], floating.
        b: [E, r], of the same dtype.
        scale: what the product is multiplied with; alpha / r, as a rule.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = static()

    def __check__(self) -> None:
        _require_low_rank("LowRank", self.a, self.b)
        if not math.isfinite(self.scale):
            raise RecordError(f"LowRank.scale must be a finite number, received {self.scale}")


@record
class Adapted:
    """Stands in a parameter tree where a linear map's weight stands: `weight + b a`, never multiplied out.

    A fused weight (q, k and v; gate and up) has the adapters of all that it holds in one: their A stand in `a` one
    below the other, and their scaled B in `b` along the diagonal, with zeros elsewhere.

    Attributes:
        weight: [E, D], not trained.
        a: [R, D], floating.
        b: [E, R], of the same dtype.
    """

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def __check__(self) -> None:
        _require_low_rank("Adapted", self.a, self.b)
        if self.weight.shape != (self.b.shape[0], self.a.shape[1]):
            raise RecordError(
                f"Adapted: the product of b {shown(self.b)} and a {shown(self.a)} must have the shape of the weight "
                f"{shown(self.weight)}"
            )


Weight = torch.Tensor | Adapted
"""What a linear map multiplies with, [E, D]."""


def _require_low_rank(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1]
    if not fits or a.dtype != b.dtype or not a.is_floating_point():
        raise RecordError(
            f"{what}: a must be [r, D] and b [E, r] of one floating dtype, received {shown(a)} and {shown(b)}"
        )
