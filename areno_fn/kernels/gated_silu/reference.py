"""Gated SiLU in plain torch, rounded where transformers rounds: silu(gate) is a tensor of its own there."""

from __future__ import annotations

import torch


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """The product silu(gate) * up, [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The cotangent of gate_up: s = sigmoid(gate), dgate = dy up s (1 + gate (1 - s)), dup = dy gate s."""
    gate, up = gate_up.chunk(2, dim=-1)
    # torch's own operator for the slope of silu: one pass instead of six
    dgate = torch.ops.aten.silu_backward(dy * up, gate)
    return torch.cat((dgate, dy * torch.nn.functional.silu(gate)), dim=-1)


def backward_with_value(dy: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cotangent of gate_up, and the product that the forward computed."""
    return backward(dy, gate_up), forward(gate_up)
