"""The AdamW update in plain torch, a leaf at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def update(
    gradients: Sequence[torch.Tensor],
    master: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    stored: torch.dtype,
    decay: Sequence[float],
    factors: Any,
    betas: tuple[float, float],
    eps: float,
) -> tuple[list[torch.Tensor], ...]:
    """New masters, both moments, and the masters in the dtype of the parameters."""
    factor, rate, bias_1, bias_2 = (x.float() for x in factors)
    new: tuple[list[torch.Tensor], ...] = ([], [], [], [])
    for g, p, m, n, own in zip(gradients, master, mu, nu, decay, strict=True):
        g = g.float() * factor
        m = m + (g - m) * (1 - betas[0])
        n = n * betas[1] + g * g * (1 - betas[1])
        direction = m / bias_1 / ((n / bias_2).sqrt() + eps)
        p = p - rate * (direction + own * p)
        for part, value in zip(new, (p, m, n, p.to(stored)), strict=True):
            part.append(value)
    return new
