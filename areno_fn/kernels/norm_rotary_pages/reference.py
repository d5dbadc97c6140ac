"""The two steps one after the other, in plain torch."""

from __future__ import annotations

import torch

from areno_fn.kernels.norm_rotary import reference as norm_rotary
from areno_fn.kernels.paged_attention import reference as paged_attention


def forward(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [N, H, head_dim]."""
    q, k = norm_rotary.forward(qkv, q_weight, k_weight, cos, sin, heads, eps)
    paged_attention.write(k, qkv[:, -k.shape[1] :], keys, values, places)
    return q
