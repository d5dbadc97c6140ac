"""Rotary embedding in plain torch; the cosines and sines are rounded to the dtype of x first, as in transformers."""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The heads, like x, with (x1 cos - x2 sin, x2 cos + x1 sin) in the place of every pair."""
    turned = 2 * cos.shape[-1]
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    rest = x[..., turned:]
    if interleaved:
        first, second = x[..., 0:turned:2], x[..., 1:turned:2]
        y = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = x[..., :turned].chunk(2, dim=-1)
        y = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The cotangent of x, like dy: the rotation by the opposite angle."""
    return forward(dy, cos, -sin, interleaved)
