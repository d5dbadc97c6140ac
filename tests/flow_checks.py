"""How losses of flow matching are compared with plain implementations written from their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_models import SHAPE, numbers

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_batch import Noised, Velocities

F64 = torch.float64
Plain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(x, frozen) -> loss`: what is differentiated, and the same at the point where stop-gradients hold it."""


def rows_named(name: str, rows: int) -> torch.Tensor:
    return numbers(name, rows, *SHAPE, dtype=F64)


def batch_of(rows: int, **fields: Any) -> Noised:
    """Noised samples with every velocity and advantage filled; groups of two."""
    sigma = torch.linspace(0.2, 0.9, rows, dtype=F64)
    clean, noise = rows_named("clean", rows), rows_named("noise", rows)
    share = sigma[:, None, None]
    defaults = {
        "state": (1 - share) * clean + share * noise,
        "target": noise - clean,
        "sigma": sigma,
        "timestep": 1000 * sigma,
        "conditions": Conditions(positive=numbers("condition", rows, 4, dtype=F64)),
        "weight": torch.ones(rows, dtype=F64),
        "advantage": 2 * numbers("advantage", rows, dtype=F64),
        "groups": torch.arange(rows) // 2,
        "old": rows_named("old", rows),
        "reference": rows_named("reference", rows),
        "average": rows_named("average", rows),
    }
    return Noised(**{**defaults, **fields})


def at(stage: Callable[[Velocities], Sums], batch: Noised, velocity: torch.Tensor) -> tuple[float, torch.Tensor, Sums]:
    """The mean loss, its gradient in the velocities, and the sums."""
    point = velocity.clone().requires_grad_()
    sums = stage(Velocities(velocity=point, batch=batch))
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    return (sums.total / sums.weight).item(), gradient, sums


def agrees(loss: float, gradient: torch.Tensor, point: torch.Tensor, plain: Plain, step: float = 1e-6) -> None:
    """Value and gradient are those of a plain implementation, the latter by central differences in float64."""
    assert loss == pytest.approx(plain(point, point).item(), rel=1e-10, abs=1e-12)
    for number in range(4):
        direction = numbers(f"direction{number}", *point.shape, dtype=F64)
        direction = direction / direction.norm()
        ahead, behind = plain(point + step * direction, point), plain(point - step * direction, point)
        expected = ((ahead - behind) / (2 * step)).item()
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=2e-6, abs=2e-8)
