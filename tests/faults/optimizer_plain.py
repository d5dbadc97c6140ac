"""Muon, gradient descent and byte-wide moments written plainly, each with mistakes that can be asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import MuonSpec, SGDSpec

Fault = str | None


def _optimizer(move: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Optimizer:
    """One leaf at a time: `move(path, parameter, gradient, memory, step) -> (parameter, memory)`."""

    def init(params: Any) -> Any:
        return {"step": 0, "memory": [torch.zeros_like(leaf) for leaf in tree.leaves(params)]}

    def apply(gradients: Any, state: Any, params: Any) -> tuple[Any, Any, dict[str, Any]]:
        step = state["step"] + 1
        named = tree.leaves_with_path(params)
        rows = [
            move(path, leaf, g, m, step)
            for (path, leaf), g, m in zip(named, tree.leaves(gradients), state["memory"], strict=True)
        ]
        return tree.unflatten(params, [p for p, _ in rows]), {"step": step, "memory": [m for _, m in rows]}, {}

    return Optimizer(init=init, apply=apply)


def _factor(matrix: torch.Tensor, iterations: int, fault: Fault) -> torch.Tensor:
    x = matrix.bfloat16()
    x = x / (
        torch.linalg.matrix_norm(x.float(), 2).bfloat16() if fault == "spectral norm" else x.norm().clamp(min=1e-7)
    )
    a, b, c = (3.4445, -4.7750, 2.0315) if fault != "another polynomial" else (15 / 8, -10 / 8, 3 / 8)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(iterations + (fault == "one iteration more")):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def muon(fault: Fault) -> Callable[[MuonSpec, dict[str, list[int]]], Optimizer]:
    """Muon for a tree of matrices; a fused one is given with the rows of its blocks."""

    def build(spec: MuonSpec, blocks: dict[str, list[int]]) -> Optimizer:
        def scale(block: torch.Tensor, whole: torch.Tensor) -> float:
            rows, columns = (whole if fault == "scaled by the whole leaf" else block).shape
            if fault == "shape turned":
                rows, columns = columns, rows
            return (
                math.sqrt(max(1, rows / columns)) if spec.adjust == "original" else 0.2 * math.sqrt(max(rows, columns))
            )

        def move(
            path: str, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, step: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            b = spec.momentum
            m = b * m + (g if fault == "sum of gradients" else (1 - b) * g)
            ahead = b * m + (1 - b) * g if spec.nesterov and fault != "nesterov forgotten" else m
            ahead = g if fault == "raw gradient" else ahead
            rows = [p.shape[0]] if fault == "fused as one" else blocks.get(path, [p.shape[0]])
            parts = [_factor(part, spec.iterations, fault) * scale(part, p) for part in ahead.split(rows)]
            decay = spec.weight_decay * p
            u = torch.cat(parts) + (0.0 if fault == "no decay" else decay)
            u = torch.cat([part * scale(part, p) for part in u.split(rows)]) if fault == "decay scaled too" else u
            return p - spec.lr * u, m

        return _optimizer(move)

    return build


def sgd(fault: Fault) -> Callable[[SGDSpec], Optimizer]:
    """Gradient descent with momentum, without clip and schedule."""

    def build(spec: SGDSpec) -> Optimizer:
        def move(
            path: str, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, step: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            del path, step
            decay = spec.weight_decay * p if p.ndim >= 2 or fault == "decay on norms" else torch.zeros_like(p)
            g = g if fault == "decay decoupled" else g + decay
            m = spec.momentum * m + ((1 - spec.momentum) * g if fault == "mean of gradients" else g)
            u = g + spec.momentum * m if spec.nesterov and fault != "nesterov forgotten" else m
            u = g if fault == "momentum forgotten" else u
            return p - spec.lr * (u + decay if fault == "decay decoupled" else u), m

        return _optimizer(move)

    return build


def adam8bit(fault: Fault) -> Callable[[], Any]:
    """The transform of the library with a fault around it, or in its bytes."""
    from areno_fn.contracts.optim import Transform
    from areno_fn.steps.optimizers.adam import bias
    from areno_fn.steps.optimizers.adam8bit import LIMIT

    def linear(x: torch.Tensor, least: float) -> torch.Tensor:
        top = x.abs().max().clamp(min=1e-30)
        return torch.where(x == 0, x, (x / top * 127).round() / 127 * top).clamp(min=least)

    def build() -> Any:
        def init(params: Any) -> Any:
            return {
                "count": torch.zeros((), dtype=torch.int64),
                "m": tree.map(torch.zeros_like, params),
                "n": tree.map(torch.zeros_like, params),
            }

        def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
            del params
            count = state["count"] + 1
            m = tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["m"], updates)
            n = tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, state["n"], updates)
            u = tree.map(lambda a, b: a / bias(0.9, count) / ((b / bias(0.999, count)).sqrt() + 1e-8), m, n)
            u = u if fault == "not bounded" else tree.map(lambda x: x.clamp(-LIMIT, LIMIT), u)
            if fault in ("linear levels", "not bounded"):
                n = tree.map(lambda x: linear(x, 0.0), n)
            if fault == "rounded to the nearest":
                n = tree.map(lambda x: torch.where(x > 0, 1.115 ** (x.log() / math.log(1.115)).round(), x), n)
            return u, {"count": count, "m": m, "n": n}

        return Transform(init=init, update=update)

    return build
