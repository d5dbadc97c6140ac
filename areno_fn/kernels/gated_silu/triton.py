"""Gated SiLU in Triton, elementwise."""

from __future__ import annotations

import torch

from areno_fn.kernels import gates


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """The product silu(gate) * up, [..., I], contiguous."""
    return gates.forward(gate_up, gates.SILU)


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The cotangent of gate_up, [..., 2 I], contiguous."""
    return gates.backward(dy, gate_up, None, gates.SILU)


def backward_with_value(dy: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cotangent of gate_up, and the product again, up to a rounding of float32 inside; both contiguous."""
    y = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    return gates.backward(dy, gate_up, y, gates.SILU), y
