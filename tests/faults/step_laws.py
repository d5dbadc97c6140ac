"""Laws of the numeric parts. Each takes an implementation and fails on a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.spec import AdamWSpec, Schedule

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def accumulation_is_exact(accumulate: Callable[..., Any]) -> None:
    """FIELDCASES L1, L3, L5: losses [1] and [2, 3, 4] give 2.5; nothing gives 0; bfloat16 adds up."""

    def losses(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Sums:
        weight = (batch != 0).to(batch.dtype).sum().float()
        return Sums(total=(params["w"] * batch).sum().float(), weight=weight, stats={}, peaks={})

    params = {"w": torch.tensor(1.0)}
    for split in (
        ([1.0], [2.0, 3.0, 4.0]),
        ([2.0, 3.0, 4.0], [1.0]),
        ([1.0, 2.0, 3.0, 4.0],),
        ([1.0, 0.0], [2.0, 3.0], [4.0]),
    ):
        gradient, sums = accumulate(losses)(params, tuple(torch.tensor(s) for s in split))
        assert gradient["w"].item() == 2.5 == (sums.total / sums.weight).item()
    assert accumulate(losses)(params, (torch.zeros(2), torch.zeros(1)))[0]["w"].item() == 0.0
    low = {"w": torch.ones(1, dtype=torch.bfloat16)}
    assert accumulate(losses)(low, (torch.ones(1, dtype=torch.bfloat16),) * 300)[0]["w"].item() == 1.0


def aggregation_values(aggregate: Callable[..., Any]) -> None:
    """FIELDCASES L5, L6, L7."""
    values, weight, segments = t(1, 1, 2, math.nan), t(1, 1, 1, 0), torch.tensor([0, 0, 1, 1])
    rights = {"token_mean": 4 / 3, "seq_mean_token_sum": 2.0, "seq_mean_token_mean": 1.5, "constant_length": 1.0}
    for how, right in rights.items():
        total, denominator = aggregate(values, weight, segments, 3, how, 2.0)
        assert (total / denominator).item() == pytest.approx(right, abs=1e-12), how
        total, denominator = aggregate(values, torch.zeros_like(weight), segments, 3, how, 2.0)
        assert total.item() == 0.0 and denominator.item() == 0.0
    point = t(1, math.inf).requires_grad_()
    total, _ = aggregate(point, t(1, 0), torch.tensor([0, 0]), 1, "token_mean")
    assert torch.autograd.grad(total, point)[0].tolist() == [1.0, 0.0]


def kl_values(kl: Callable[..., torch.Tensor]) -> None:
    """FIELDCASES L12."""
    logp = t(-1.0).requires_grad_()
    for name, value, slope in (("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693)):
        estimate = kl(logp, t(-1.5), name)
        assert estimate.item() == pytest.approx(value, abs=5e-8)
        assert estimate.requires_grad
        assert torch.autograd.grad(estimate.sum(), logp)[0].item() == pytest.approx(slope, abs=5e-8)
    far = t(-100.0).requires_grad_()
    estimate = kl(far, t(-1.0), "k3")
    assert estimate.item() == pytest.approx(math.exp(20) - 21)
    assert torch.autograd.grad(estimate.sum(), far)[0].item() == 0.0


def clipped_values(clipped: Callable[..., Any]) -> None:
    """FIELDCASES L11, L17 and the PPO row of the table of values."""

    def at(stage: Any, logp: Any, old: Any, advantage: Any, reference: Any = None) -> tuple[float, list[float]]:
        point, zeros = t(*logp).requires_grad_(), torch.zeros(len(logp), dtype=torch.int64)
        fields = {
            "weight": torch.ones(len(logp), dtype=F64),
            "segments": zeros,
            "entropy": zeros.double(),
            "documents": 1,
        }
        data = {"old": t(*old), "advantage": t(*advantage), "reference": None if reference is None else t(*reference)}
        sums = stage(Actions(logp=point, **fields, **data))
        (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
        return (sums.total / sums.weight).item(), gradient.tolist()

    up, down = math.exp(0.5), math.exp(-0.5)
    for logp, advantage, loss, slope in (
        (-0.5, 1.0, -1.28, 0.0),
        (-0.5, -1.0, up, up),
        (-1.5, 1.0, -down, -down),
        (-1.5, -1.0, 0.8, 0.0),
        (-1.0, 2.0, -2.0, -2.0),
    ):
        found, gradient = at(clipped(0.2, 0.28), (logp,), (-1.0,), (advantage,))
        assert found == pytest.approx(loss, abs=1e-12) and gradient == [pytest.approx(slope, abs=1e-12)]
    found, gradient = at(clipped(kl_coef=0.01), (-0.2, -0.45), (-0.3, -0.4), (1, -1), (-0.25, -0.35))
    assert found == pytest.approx(-0.07693876, abs=5e-8) and gradient == pytest.approx(
        [-0.55234164, 0.47508886], abs=5e-8
    )


def advantage_values(group_advantages: Callable[..., torch.Tensor]) -> None:
    """FIELDCASES L9, L10 and the table of values."""
    groups = torch.tensor([7, 2, 7, 2])
    root = math.sqrt(3)
    assert group_advantages(t(0, 0, 0, 1), torch.zeros(4).long()).tolist() == pytest.approx(
        [-1 / root] * 3 + [root], abs=1e-7
    )
    assert group_advantages(t(5, 5, 5), torch.zeros(3).long()).tolist() == [0.0] * 3
    assert group_advantages(t(0, 0, 1, 10), groups).tolist() == pytest.approx([-1, -1, 1, 1], abs=1e-7)
    assert group_advantages(t(0, 0, 1, 10), groups, scale="none").tolist() == pytest.approx(
        [-0.5, -5, 0.5, 5], abs=1e-7
    )
    std = math.sqrt(101 / 4 - 2.75**2)
    batch = group_advantages(t(0, 0, 1, 10), groups, scale="batch").tolist()
    assert batch == pytest.approx([-0.5 / std, -5 / std, 0.5 / std, 5 / std], abs=1e-7)
    assert group_advantages(t(0, 2e-8), torch.zeros(2).long()).tolist() == pytest.approx([-0.5, 0.5], abs=1e-7)


def schedule_values(learning_rate: Callable[..., Callable[[int], float]]) -> None:
    """FIELDCASES O9 and the table of values."""
    cosine = learning_rate(Schedule(kind="cosine", min_lr=1e-7), 1e-6, 1000)
    for step, value in ((1, 9.9999778e-7), (250, 8.68198e-7), (500, 5.5e-7), (1000, 1e-7), (1500, 1e-7)):
        assert cosine(step) == pytest.approx(value, rel=1e-7 if step != 250 else 1e-6)
    linear = learning_rate(Schedule(kind="linear", warmup_steps=2, min_lr=1.0), 5.0, 10)
    assert [linear(s) for s in (1, 2, 4, 6, 8, 10, 12)] == [2.5, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0]
    wsd = learning_rate(Schedule(kind="wsd", warmup_steps=2, stable_steps=4, min_lr=1.0), 5.0, 10)
    assert [wsd(s) for s in range(1, 11)] == [2.5, 5.0, 5.0, 5.0, 5.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def clip_values(clip_by_global_norm: Callable[[float], Transform]) -> None:
    """min(1, c / (norm + 1e-6)) with the norm over all leaves, as torch's `clip_grad_norm_`."""
    gradient = {"a": t(3.0, 0.0), "b": t(-4.0)}
    for limit in (1.0, 2.0, 5.0, 10.0):
        leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradient.values()]
        for p, g in zip(leaves, gradient.values(), strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(leaves, limit)
        transform = clip_by_global_norm(limit)
        found, _ = transform.update(gradient, transform.init(gradient), gradient)
        for a, p in zip(tree.leaves(found), leaves, strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-12, atol=0)


def adamw_is_torchs(adamw: Callable[[AdamWSpec, int], Optimizer]) -> None:
    """25 steps in float64 against `torch.optim.AdamW` with decay on matrices alone; then FIELDCASES O1, and purity."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 2), "norm": (3,), "scale": ()}
    params = {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in shapes.items()}
    spec = AdamWSpec(
        lr=0.05, weight_decay=0.2, max_grad_norm=0.7, eps=1e-3, schedule=Schedule(kind="linear", warmup_steps=5)
    )
    leaves = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    groups = [
        {"params": [leaves["w"]], "weight_decay": 0.2},
        {"params": [leaves["norm"], leaves["scale"]], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, eps=spec.eps)
    ours = adamw(spec, 25)
    state = ours.init(params)
    for step in range(1, 26):
        rate = 0.05 * (step / 5 if step < 5 else (25 - step) / 20)
        gradient = {name: 3 * p + math.cos(step) for name, p in params.items()}
        before = tree.map(torch.clone, (gradient, params))
        moved, state, _ = ours.apply(gradient, state, params)
        assert tree.equal((gradient, params), before), "an argument was written to"
        for p in leaves.values():
            p.grad = 3 * p.detach() + math.cos(step)
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), 0.7)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        params = moved
        for name, p in leaves.items():
            torch.testing.assert_close(params[name], p.detach(), rtol=1e-11, atol=1e-12)
    small = adamw(AdamWSpec(lr=6e-4, weight_decay=0.0), 100)
    norm = {"norm": torch.ones(1, dtype=torch.bfloat16)}
    state = small.init(norm)
    for _ in range(100):
        norm, state, _ = small.apply({"norm": torch.ones(1)}, state, norm)
    assert norm["norm"].item() == torch.tensor(0.94).bfloat16().item()
