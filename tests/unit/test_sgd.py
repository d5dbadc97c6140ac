"""Gradient descent with momentum against torch's and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.spec import Schedule, SGDSpec
from areno_fn.steps.optimizers import momentum, sgd
from areno_fn.testing import laws


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARAMS = {"layers": [{"w": draw(5, 4), "norm": draw(4, seed=1)}], "scale": draw(seed=2)}


@pytest.mark.parametrize(("beta", "nesterov", "decay"), [(0.0, False, 0.1), (0.9, False, 0.0), (0.9, True, 0.1)])
def test_sgd_equals_torch_over_100_steps(beta: float, nesterov: bool, decay: float) -> None:
    spec = SGDSpec(
        lr=0.01,
        momentum=beta,
        nesterov=nesterov,
        weight_decay=decay,
        max_grad_norm=0.5,
        schedule=Schedule(kind="cosine", warmup_steps=10),
    )

    def make(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.01, momentum=beta, nesterov=nesterov)

    def before(leaves: list[torch.nn.Parameter], optimizer: Any, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        share = (
            step / 10
            if step < 10
            else (1 + torch.cos(torch.tensor(torch.pi * (step - 10) / 90, dtype=torch.float64)).item()) / 2
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * share

    laws.optimizer_matches(sgd(spec, 100), make, PARAMS, before_step=before)


def test_momentum_by_hand() -> None:
    """m = 1, then 0.5 + 2; looked ahead 2 + 0.5 * 2.5."""
    one, two = {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
    plain, ahead = momentum(0.5), momentum(0.5, nesterov=True)
    _, state = plain.update(one, plain.init(one), one)
    assert plain.update(two, state, one)[0]["w"].item() == 2.5
    assert ahead.update(two, state, one)[0]["w"].item() == 3.25


def test_a_step_is_pure_and_moves_low_precision_by_its_master() -> None:
    params = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    optimizer = sgd(SGDSpec(lr=1e-4, max_grad_norm=0.0, momentum=0.0), 10)
    moved, state, stats = laws.pure(optimizer.apply, tree.map(torch.ones_like, params), optimizer.init(params), params)
    assert state.master["w"].tolist() == [[pytest.approx(0.9999, abs=1e-7)] * 2] * 2
    assert moved["w"].tolist() == [[1.0] * 2] * 2 and stats["lr"].item() == 1e-4
