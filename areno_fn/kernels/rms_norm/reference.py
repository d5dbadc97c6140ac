"""RMS normalisation in plain torch: float32 inside (float64 for float64), rounded where transformers rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def forward(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float, zero_centred: bool
) -> torch.Tensor:
    """The scaled rows, [..., D] in the dtype of x."""
    wide = _wide(x)
    normal = wide * _reciprocal(wide, eps)
    y = normal * (1 + weight.to(wide.dtype)) if zero_centred else normal.to(x.dtype) * weight
    y = y.to(x.dtype)
    return y if gate is None else (y * F.silu(_wide(gate))).to(x.dtype)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents dx, dw and that of the gate: n = x r, g = dy w, dx = r (g - n mean(g n)), dw = sum of dy n over rows."""
    wide = _wide(x)
    reciprocal = _reciprocal(wide, eps)
    normal = wide * reciprocal
    dy = dy.to(wide.dtype)
    dgate = x.new_empty(0)
    if gate is not None:
        y = forward(x, weight, None, eps, zero_centred)
        dgate = torch.ops.aten.silu_backward(dy * y, _wide(gate)).to(x.dtype)
        dy = dy * F.silu(_wide(gate))
    scale = weight.to(wide.dtype)
    g = dy * (1 + scale) if zero_centred else dy * scale
    slope = (g * normal).mean(-1, keepdim=True)
    dx = torch.addcmul(g, normal, slope, value=-1).mul_(reciprocal)
    scaled = normal if zero_centred else normal.to(x.dtype)
    dweight = (dy * scaled).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype), dgate


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _reciprocal(wide: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
