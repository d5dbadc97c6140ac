"""AdamW in one pass against AdamW as it is composed: parameters, every number of the state, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec, Schedule
from areno_fn.steps.optimizers import adamw, fused

SPECS = {
    "plain": AdamWSpec(lr=1e-2),
    "decay": AdamWSpec(lr=1e-2, weight_decay=0.3, max_grad_norm=0.5, betas=(0.8, 0.9)),
    "all decay, no clip": AdamWSpec(lr=3e-2, weight_decay=0.1, decay="all", max_grad_norm=0),
    "schedule": AdamWSpec(lr=1e-2, schedule=Schedule(kind="cosine", warmup_steps=2)),
}


def parameters() -> dict[str, Any]:
    source = torch.Generator().manual_seed(1)
    shapes = {"matrix": (5, 7), "norm": (7,), "scalar": (), "wide": (3, 4)}
    values = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    return {name: x if name == "wide" else x.bfloat16() for name, x in values.items()}


def run(optimizer: Optimizer, steps: int) -> tuple[Any, Any, list[Any]]:
    params = parameters()
    state, told = optimizer.init(params), []
    for step in range(steps):
        gradient = {name: (x.float() * (step + 1)).sin() for name, x in parameters().items()}
        params, state, stats = optimizer.apply(gradient, state, params)
        told.append(stats)
    return params, state, told


@pytest.mark.parametrize("name", SPECS)
def test_one_pass_is_the_composition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(adamw(SPECS[name], 6), 5)
    passes: list[int] = []

    def watched(*args: Any) -> Any:
        passes.append(len(args[0]))
        return update(*args)

    update = fused.adamw_update
    monkeypatch.setattr(fused, "adamw_update", watched)
    monkeypatch.setattr(fused, "takes", lambda leaves, gradients: True)
    got = run(adamw(SPECS[name], 6), 5)
    assert passes == [3, 1] * 5  # one pass for what is stored in bfloat16, one for what is in float32
    for (path, a), b in zip(tree.leaves_with_path(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        bound = 1e-2 if a.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(a, b, rtol=bound, atol=bound / 10, msg=lambda m, path=path: f"{path}: {m}")
    assert torch.equal(got[0]["matrix"], got[1].master["matrix"].bfloat16())


def test_the_cpu_and_double_precision_are_composed() -> None:
    x = torch.ones(3)
    assert not fused.takes([x], [x])
