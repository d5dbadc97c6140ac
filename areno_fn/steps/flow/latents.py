"""Numbers per row beside tensors of latents."""

from __future__ import annotations

import torch

from areno_fn.steps.reduce import divide, wide


def along(rows: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Numbers [B] shaped [B, 1, ...] so that they broadcast over latents [B, *]; at least float32."""
    return wide(rows).reshape(-1, *[1] * (latents.ndim - 1))


def over_latent(values: torch.Tensor, mask: torch.Tensor | None = None, over: str = "mean") -> torch.Tensor:
    """The mean or the sum over the elements of each latent, [B].

    Where the mask is False, neither a value nor a gradient enters, whatever stands there, and the mean is over the
    other elements.

    Args:
        values: floating [B, *].
        mask: bool [B, *].
        over: "mean" or "sum".
    """
    flat = wide(values).flatten(1)
    if mask is None:
        return flat.mean(1) if over == "mean" else flat.sum(1)
    live = mask.flatten(1)
    total = torch.where(live, flat, 0.0).sum(1)
    return divide(total, live.sum(1).to(total.dtype)) if over == "mean" else total


def live(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The values with 0 where the mask is False; apply it before arithmetic, so that nothing masked has a gradient."""
    return wide(values) if mask is None else torch.where(mask, wide(values), 0.0)
