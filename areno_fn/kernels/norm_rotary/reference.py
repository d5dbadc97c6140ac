"""Queries and keys normalised per head and rotated, in plain torch: rounded where the two primitives round."""

from __future__ import annotations

import torch

from areno_fn.kernels.rms_norm import reference as rms_norm
from areno_fn.kernels.rotary import reference as rotary


def forward(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries [N, H, head_dim] and keys [N, K, head_dim]."""
    q, k, _ = _parts(qkv, heads)
    turned = (rotary.forward(_normal(x, w, eps), cos, sin, False) for x, w in ((q, q_weight), (k, k_weight)))
    rotated_q, rotated_k = turned
    return rotated_q, rotated_k


def backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor | None,
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of qkv, with dv (or zeros) behind, and of both weights (empty where there is none)."""
    q, k, v = _parts(qkv, dq.shape[1])
    dq, dq_weight = _pulled(rotary.backward(dq, cos, sin, False), q, q_weight, eps)
    dk, dk_weight = _pulled(rotary.backward(dk, cos, sin, False), k, k_weight, eps)
    behind = torch.zeros_like(v) if dv is None else dv
    return torch.cat((dq, dk, behind), dim=1).to(qkv.dtype), dq_weight, dk_weight


def _parts(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shared = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split((heads, shared, shared), dim=1)
    return q, k, v


def _normal(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else rms_norm.forward(x, weight, None, eps, False)


def _pulled(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return (dy, dy.new_empty(0)) if weight is None else rms_norm.backward(dy, x, weight, None, eps, False)[:2]
