"""The symmetric product in plain torch, with the calls of `torch.optim.Muon`."""

from __future__ import annotations

import torch


def product(a: torch.Tensor, c: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    """The sum `alpha a a^T + beta c`."""
    if a.ndim > 2:
        rest = None if c is None else c.flatten(0, -3)
        parts = [product(x, None if rest is None else rest[i], alpha, beta) for i, x in enumerate(a.flatten(0, -3))]
        return (
            torch.stack(parts).reshape(*a.shape[:-1], a.shape[-2]) if parts else a.new_empty(*a.shape[:-1], a.shape[-2])
        )
    if c is None:
        made = a @ a.T
        return made if alpha == 1 else alpha * made
    return torch.addmm(c, a, a.T, beta=beta, alpha=alpha)
