"""Gated SiLU in plain torch, rounded where transformers rounds: silu(gate) is a tensor of its own there."""

from __future__ import annotations

import torch


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """The product silu(gate) * up, [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The cotangent of gate_up: s = sigmoid(gate), dgate = dy up s (1 + gate (1 - s)), dup = dy gate s."""
    gate, up = (gate_up if gate_up.dtype == torch.float64 else gate_up.float()).chunk(2, dim=-1)
    dy = dy.to(gate.dtype)
    s = torch.sigmoid(gate)
    activated = gate * s
    dgate = dy * up * (s + activated * (1 - s))
    return torch.cat((dgate, dy * activated.to(gate_up.dtype)), dim=-1).to(gate_up.dtype)
