"""A sum and its RMS normalisation in plain torch; the sum is rounded to the dtype of x, as a tensor of its own is."""

from __future__ import annotations

import torch

from areno_fn.kernels.rms_norm import reference


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its scaled rows, [..., D] in the dtype of x."""
    total = x + residual
    return total, reference.forward(total, weight, None, eps, zero_centred)


def backward(
    dtotal: torch.Tensor,
    dnormal: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangent of both summands, that of the weight, and the scaled rows again."""
    dx, dweight, _ = reference.backward(dnormal, total, weight, None, eps, zero_centred)
    return dx + dtotal, dweight, reference.forward(total, weight, None, eps, zero_centred)
