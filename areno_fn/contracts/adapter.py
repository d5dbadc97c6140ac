"""Adapters: low-rank parts that are trained beside a weight which stays as it is (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import record, shown, static


@record
class LowRank:
    """A change of a weight, scale * B A, of rank r at most.

    Attributes:
        a: [r, D], floating.
        b: [E, r], of the same dtype.
        scale: what the product is multiplied with; alpha / r, as a rule.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = static()

    def __check__(self) -> None:
        fits = self.a.ndim == self.b.ndim == 2 and self.a.shape[0] == self.b.shape[1]
        if not fits or self.a.dtype != self.b.dtype or not self.a.is_floating_point():
            raise RecordError(
                f"LowRank: a must be [r, D] and b [E, r] of one floating dtype, received {shown(self.a)} and {shown(self.b)}"
            )
        if not math.isfinite(self.scale):
            raise RecordError(f"LowRank.scale must be a finite number, received {self.scale}")


@record
class Adapted:
    """Stands in a parameter tree where a linear map's weight stands: the weight, and changes of some of its rows.

    A fused weight (q, k and v; gate and up) has a part for each of those that are adapted.

    Attributes:
        weight: [E, D], not trained.
        parts: the changes, in the order of their rows.
        starts: for each part, the first row of `weight` that it changes.
    """

    weight: torch.Tensor
    parts: tuple[LowRank, ...]
    starts: tuple[int, ...] = static()

    def __check__(self) -> None:
        if self.weight.ndim != 2 or len(self.parts) != len(self.starts):
            raise RecordError(
                f"Adapted: weight must be [E, D] with a start for each part, received {shown(self.weight)}, "
                f"{len(self.parts)} parts and {len(self.starts)} starts"
            )
        free = 0
        for part, start in zip(self.parts, self.starts, strict=True):
            end = start + part.b.shape[0]
            if start < free or end > self.weight.shape[0] or part.a.shape[1] != self.weight.shape[1]:
                raise RecordError(
                    f"Adapted: a part with a {shown(part.a)} and b {shown(part.b)} does not fit at row {start} of a weight "
                    f"{shown(self.weight)} whose first {free} rows are taken"
                )
            free = end


Weight = torch.Tensor | Adapted
"""What a linear map multiplies with, [E, D]."""
