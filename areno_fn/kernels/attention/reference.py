"""Packed attention in plain torch, with every score formed: for what no kernel of torch or of this folder takes."""

from __future__ import annotations

import torch

from areno_fn.kernels.attention.layout import PackedLayout


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """The attended values [N, H, head_dim]; needs documents x H x longest^2 numbers. Scores and weights are in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (layout.pad(x).transpose(1, 2).to(wide) for x in (q, k, v))
    queries = queries.unflatten(1, (k.shape[1], group))
    scores = torch.einsum("bkgid,bkjd->bkgij", queries, keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    place = torch.arange(layout.longest, device=q.device)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(q.dtype).to(wide)
    mixed = torch.einsum("bkgij,bkjd->bkgid", weights, values).flatten(1, 2)
    return layout.unpad(mixed.transpose(1, 2)).to(q.dtype)


def attend_cached(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float, soft_cap: float
) -> torch.Tensor:
    """What heads [B, K, G, head_dim] read of caches [B, K, S, head_dim] at the places that are seen, bool [B, S]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = soft_cap * torch.tanh(q.to(wide) @ keys.to(wide).mT * (scale / soft_cap))
    weights = scores.masked_fill(~seen[:, None, None, :], -torch.inf).softmax(-1).to(q.dtype).to(wide)
    return (weights @ values.to(wide)).to(q.dtype)
