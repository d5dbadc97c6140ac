"""Gated GELU in plain torch, rounded where transformers rounds: gelu(gate) is a tensor of its own there."""

from __future__ import annotations

import torch


def forward(gate_up: torch.Tensor, approximate: bool) -> torch.Tensor:
    """The product gelu(gate) * up, [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=_name(approximate)) * up


def backward(dy: torch.Tensor, gate_up: torch.Tensor, approximate: bool) -> torch.Tensor:
    """The cotangent of gate_up: dgate = dy up gelu'(gate), dup = dy gelu(gate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=_name(approximate))
    return torch.cat((dgate, dy * torch.nn.functional.gelu(gate, approximate=_name(approximate))), dim=-1)


def backward_with_value(
    dy: torch.Tensor, gate_up: torch.Tensor, approximate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cotangent of gate_up, and the product that the forward computed."""
    return backward(dy, gate_up, approximate), forward(gate_up, approximate)


def _name(approximate: bool) -> str:
    return "tanh" if approximate else "none"
