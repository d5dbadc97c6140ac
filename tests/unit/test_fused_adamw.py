"""AdamW in one pass against AdamW as it is composed: parameters, every number of the state, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec, Group, Schedule
from areno_fn.steps.optimizers import adamw, fused

SPECS = {
    "plain": AdamWSpec(lr=1e-2),
    "decay": AdamWSpec(lr=1e-2, weight_decay=0.3, max_grad_norm=0.5, betas=(0.8, 0.9)),
    "all decay, no clip": AdamWSpec(lr=3e-2, weight_decay=0.1, decay="all", max_grad_norm=0),
    "groups": AdamWSpec(
        lr=1e-2,
        weight_decay=0.1,
        schedule=Schedule(kind="linear", warmup_steps=1),
        groups=[Group(name="ends", paths=["sc*", "wide"], lr=3e-2, weight_decay=0.2)],
    ),
    "stored": AdamWSpec(lr=1e-2, weight_decay=0.3, states="stored"),
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
    # one pass for what is stored in bfloat16 and one for what is in float32, of every group
    assert passes == ([2, 1, 1] if SPECS[name].groups else [3, 1]) * 5
    for (path, a), b in zip(tree.leaves_with_path(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        bound = 1e-2 if a.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(a, b, rtol=bound, atol=bound / 10, msg=lambda m, path=path: f"{path}: {m}")
    if SPECS[name].states == "float32":
        assert torch.equal(got[0]["matrix"], got[1].master["matrix"].bfloat16())
    else:
        assert got[1].master == {} and got[1].inner[1].mu["matrix"].dtype == torch.bfloat16


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_in_place_is_the_same_in_the_memory_of_the_old_state(
    name: str, one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "takes", lambda leaves, gradients: one_pass)
    optimizer = adamw(SPECS[name], 6)
    want = run(optimizer, 5)
    assert optimizer.apply_in_place is not None
    params = parameters()
    state = optimizer.init(params)
    places = addresses(params, state)
    for step in range(5):
        gradient = {name: (x.float() * (step + 1)).sin() for name, x in parameters().items()}
        params, state, stats = optimizer.apply_in_place(gradient, state, params)
        assert tree.equal(stats, want[2][step])
    assert tree.equal((params, state), want[:2])
    assert addresses(params, state) == places


def addresses(params: Any, state: Any) -> list[int]:
    """Of all but the numbers that are one for all parameters."""
    moments = [x for x in tree.leaves(state.inner[1]) if x.numel() > 1]
    return [x.data_ptr() for x in (*tree.leaves((params, state.master)), *moments)]


def test_the_cpu_and_double_precision_are_composed() -> None:
    x = torch.ones(3)
    assert not fused.takes([x], [x])
