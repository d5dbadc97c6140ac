"""Planted mistakes in optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from faults import optimizer_plain as plain
from faults.case import Case

from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.placement import Block, Fused
from areno_fn.contracts.spec import MuonSpec, SGDSpec
from areno_fn.steps.optimizers import muon, scale_by_adam8bit, sgd
from areno_fn.testing import laws

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def muon_is_torchs_block_by_block(build: Callable[[MuonSpec, dict[str, list[int]]], Optimizer]) -> None:
    """20 steps against `torch.optim.Muon`, to which a fused leaf is given as two parameters."""
    blocks = {"fused": [6, 3]}
    for adjust in ("original", "match_rms_adamw"):
        spec = MuonSpec(lr=0.05, weight_decay=0.3, momentum=0.8, max_grad_norm=0.0, adjust=adjust)  # type: ignore[arg-type]
        params = {"fused": draw(9, 3), "tall": draw(6, 3, seed=1), "wide": draw(3, 5, seed=2)}
        parts = {"q": params["fused"][:6], "k": params["fused"][6:], "tall": params["tall"], "wide": params["wide"]}
        leaves = {name: torch.nn.Parameter(part.clone()) for name, part in parts.items()}
        theirs = torch.optim.Muon(list(leaves.values()), lr=0.05, weight_decay=0.3, momentum=0.8, adjust_lr_fn=adjust)
        ours = build(spec, blocks)
        state = ours.init(params)
        for step in range(20):
            noise = {name: draw(*leaf.shape, seed=10 + step) for name, leaf in leaves.items()}
            given = {"fused": torch.cat([noise["q"], noise["k"]]), "tall": noise["tall"], "wide": noise["wide"]}
            params, state, _ = ours.apply({name: given[name] + params[name] for name in params}, state, params)
            for name, leaf in leaves.items():
                leaf.grad = noise[name] + leaf.detach()
            theirs.step()
            after = {name: leaf.detach() for name, leaf in leaves.items()}
            torch.testing.assert_close(params["fused"], torch.cat([after["q"], after["k"]]), rtol=0, atol=1e-11)
            torch.testing.assert_close(params["tall"], after["tall"], rtol=0, atol=1e-11)
            torch.testing.assert_close(params["wide"], after["wide"], rtol=0, atol=1e-11)


def sgd_is_torchs(build: Callable[[SGDSpec], Optimizer]) -> None:
    """With and without nesterov, by the law for everybody."""
    for nesterov in (False, True):

        def make(named: dict[str, torch.nn.Parameter], nesterov: bool = nesterov) -> torch.optim.Optimizer:
            groups = [{"params": [named["w"]], "weight_decay": 0.2}, {"params": [named["norm"]], "weight_decay": 0.0}]
            return torch.optim.SGD(groups, lr=0.02, momentum=0.8, nesterov=nesterov)

        spec = SGDSpec(lr=0.02, momentum=0.8, nesterov=nesterov, weight_decay=0.2, max_grad_norm=0.0)
        params = {"w": draw(3, 4), "norm": draw(3, seed=1)}
        laws.optimizer_matches(build(spec), make, params, steps=20, tolerances={F64: 1e-11})


def byte_moments_serve(build: Callable[[], Any]) -> None:
    """No update beyond 4; a small element beside a large one moves like it; a second moment follows a gradient that fades."""
    transform = build()
    params = {"w": torch.zeros(64, dtype=F64)}
    state = transform.init(params)
    mixed = {"w": torch.full((64,), 1e-4, dtype=F64).index_fill(0, torch.tensor([0]), 1.0)}
    for _ in range(30):
        moves, state = transform.update(mixed, state, params)
        assert moves["w"].abs().max() <= 4.0
        assert ((moves["w"] - 1).abs() < 0.4).all(), "a small element"
    state = transform.init(params)
    for step in range(2300):
        moves, state = transform.update({"w": torch.full((64,), 1.0 if step < 300 else 0.1, dtype=F64)}, state, params)
    # n is 0.01 + (0.2593 - 0.01) 0.999^2000 = 0.0437 by then, its correction 0.900: the update is 0.1 / sqrt(0.0486)
    assert abs(float(moves["w"].mean()) - 0.454) < 0.05, "a second moment that stands still"


def library_muon(spec: MuonSpec, blocks: dict[str, list[int]]) -> Optimizer:
    return muon(spec, 20, {path: Fused(tuple(Block(rows) for rows in sizes)) for path, sizes in blocks.items()})


CASES: dict[str, Case] = {
    "muon": (
        muon_is_torchs_block_by_block,
        library_muon,
        plain.muon,
        (
            "raw gradient",
            "nesterov forgotten",
            "sum of gradients",
            "fused as one",
            "scaled by the whole leaf",
            "shape turned",
            "no decay",
            "decay scaled too",
            "one iteration more",
            "another polynomial",
            "spectral norm",
        ),
    ),
    "sgd": (
        sgd_is_torchs,
        lambda spec: sgd(spec, 20),
        plain.sgd,
        ("decay decoupled", "decay on norms", "mean of gradients", "nesterov forgotten", "momentum forgotten"),
    ),
    "adam8bit": (
        byte_moments_serve,
        scale_by_adam8bit,
        plain.adam8bit,
        ("linear levels", "not bounded", "rounded to the nearest"),
    ),
}
