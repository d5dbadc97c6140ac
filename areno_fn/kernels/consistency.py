"""`Primitives`: what computes the rows of a model, chosen by how much a rollout and training are to have in common."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from areno_fn.contracts.spec_base import Consistency
from areno_fn.kernels import ordered_attention
from areno_fn.kernels.attention import PackedLayout, fused, packed_attention
from areno_fn.kernels.linear import linear
from areno_fn.kernels.ordered_linear import ordered_linear
from areno_fn.kernels.paged_attention import paged_attention


@attrs.frozen(kw_only=True)
class Primitives:
    """Functions of rows that are computed among others. What is not here is computed row by row in any case.

    Attributes:
        linear: `(x, weight, bias) -> rows`.
        fused: `(q, k, v, layout, scale) -> (attended, ..)`, without a derivative, with what `fused.backward` needs.
        packed: `(q, k, v, layout, scale) -> attended`.
        paged: `(q, keys, values, table, lengths, scale, longest=..) -> attended`.
    """

    linear: Callable[..., torch.Tensor]
    fused: Callable[..., tuple[torch.Tensor, ...]]
    packed: Callable[..., torch.Tensor]
    paged: Callable[..., torch.Tensor]


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> tuple[torch.Tensor, ...]:
    return fused.forward(q, k, v, layout, scale)


ORDINARY = Primitives(linear=linear, fused=_fused, packed=packed_attention, paged=paged_attention)
"""The fastest there are; on the GPU a row depends on the others by roundings."""

BITWISE = Primitives(
    linear=ordered_linear,
    fused=ordered_attention.forward,
    packed=ordered_attention.packed,
    paged=ordered_attention.over_pages,
)
"""A row has the same bits whatever it is computed with."""

_BY_NAME = {"ordinary": ORDINARY, "bitwise": BITWISE}


def primitives(consistency: Consistency) -> Primitives:
    """Those of a mode."""
    return _BY_NAME[consistency]
