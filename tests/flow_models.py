"""Small velocity fields for tests."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import random
from areno_fn.contracts.flow import Conditions, FlowPrompts
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.key import Key

SHAPE = (2, 3)
WIDTH = 6


class Field:
    """v = tanh(x A + t b + c C) D + x E, per row; every parameter matters at every place."""

    latent_shape = SHAPE
    guide = staticmethod(straight)

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        dtype = params["a"].dtype
        x = state.flatten(1).to(dtype)
        inner = x @ params["a"] + (timestep.to(dtype) / 1000)[:, None] * params["b"] + condition.to(dtype) @ params["c"]
        return (torch.tanh(inner) @ params["d"] + x @ params["e"]).reshape(state.shape)


def numbers(name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that depend on the name alone."""
    count = torch.arange(int(torch.tensor(shape).prod()) if shape else 1)
    return (random.normal(Key.of(0).fold(name), count, dtype=torch.float64) * scale).reshape(shape).to(dtype)


def parameters(name: str = "actor", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {"a": (WIDTH, 5), "b": (5,), "c": (4, 5), "d": (5, WIDTH), "e": (WIDTH, WIDTH)}
    return {key: numbers(name + key, *shape, scale=0.4, dtype=dtype) for key, shape in shapes.items()}


def prompts(count: int = 3, first: int = 10, *, negative: bool = False) -> FlowPrompts:
    ids = torch.arange(first, first + count)
    rows = torch.stack([numbers(f"condition{i}", 4) for i in ids.tolist()])
    away = torch.stack([numbers(f"away{i}", 4) for i in ids.tolist()]) if negative else None
    return FlowPrompts(conditions=Conditions(positive=rows, negative=away), ids=ids)
