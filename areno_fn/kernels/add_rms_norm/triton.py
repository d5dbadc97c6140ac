"""A sum and its RMS normalisation in Triton, by the kernels of `rms_norm`: both summands are read once.

The backward adds the cotangent of the sum to that of the normalisation, and writes the normalised rows again for a product
that needs them.
"""

from __future__ import annotations

import torch

from areno_fn.kernels.launch import Steps, tile, warps
from areno_fn.kernels.rms_norm.triton import launch_backward, launch_forward, require_fits


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its scaled rows, [..., D], contiguous."""
    require_fits("add_rms_norm", x)
    total, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    launch_forward(x, residual, weight, total, y, eps, zero_centred, added=True)
    return total, y


def backward(
    dtotal: torch.Tensor,
    dnormal: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangent of both summands, that of the weight, and the scaled rows; contiguous."""
    require_fits("add_rms_norm", total)
    dx, y = (torch.empty(total.shape, dtype=total.dtype, device=total.device) for _ in range(2))
    step = walk(total.shape[-1])
    dweight = launch_backward(dnormal, total, dtotal, weight, dx, y, eps, zero_centred, step, added=True)
    return dx, dweight, y


def walk(size: int) -> Steps:
    """The steps of the backward over lines of so many elements."""
    rows, columns = tile(size, 2048)
    return Steps(rows=rows, warps=min(8, warps(rows * columns)), stages=2, held=16)
