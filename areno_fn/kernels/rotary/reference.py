"""Rotary embedding in plain torch; the cosines and sines are rounded to the dtype of x first, as in transformers."""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotated heads, like x: (x1 cos - x2 sin, x2 cos + x1 sin)."""
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The cotangent of x, like dy: the rotation by the opposite angle."""
    return forward(dy, cos, -sin)
