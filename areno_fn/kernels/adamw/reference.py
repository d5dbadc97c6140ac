"""The AdamW update in plain torch, a leaf at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def update(
    gradients: Sequence[torch.Tensor],
    master: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    stored: torch.dtype,
    decay: Sequence[float],
    factors: Sequence[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
) -> tuple[list[torch.Tensor], ...]:
    """New masters, both moments, and the masters in the dtype of the parameters."""
    new: tuple[list[torch.Tensor], ...] = ([], [], [], [])
    for p, m, n in _moved(gradients, master, mu, nu, decay, factors, betas, eps):
        own = master[0].dtype
        values = p.to(own), m.to(own), n.to(own)
        for part, value in zip(new, (*values, values[0] if own == stored else p.to(stored)), strict=True):
            part.append(value)
    return new


def update_in_place(
    gradients: Sequence[torch.Tensor],
    master: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    decay: Sequence[float],
    factors: Sequence[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """The same, written over what it is made of."""
    moved = _moved(gradients, master, mu, nu, decay, factors, betas, eps)
    for new, *leaves in zip(moved, master, mu, nu, stored, strict=True):
        for leaf, value in zip(leaves, (*new, new[0]), strict=True):
            leaf.copy_(value)


def _moved(
    gradients: Sequence[torch.Tensor],
    master: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    decay: Sequence[float],
    factors: Sequence[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The value and the moments of every leaf after the update, float32."""
    factor, rate, bias_1, bias_2 = (x.float() for x in factors)
    for g, p, m, n, own in zip(gradients, master, mu, nu, decay, strict=True):
        g, p, m, n = g.float() * factor, p.float(), m.float(), n.float()
        m = m + (g - m) * (1 - betas[0])
        n = n * betas[1] + g * g * (1 - betas[1])
        direction = m / bias_1 / ((n / bias_2).sqrt() + eps)
        yield p - rate * (direction + own * p), m, n
