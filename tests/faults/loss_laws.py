"""Laws of the losses over pairs and sequences and of the advantages of tokens. Each fails on a wrong implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from areno_fn.contracts.actions import Actions, Comparisons, Estimates

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def _derived(stage: Any, record: Callable[[torch.Tensor], Any], logp: torch.Tensor) -> tuple[float, list[float]]:
    point = logp.clone().requires_grad_()
    sums = stage(record(point))
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    return (sums.total / sums.weight).item(), gradient.tolist()


def preference_values(preference: Callable[..., Any]) -> None:
    """The DPO rows of the table of values, FIELDCASES L18, and two pairs of answers of different lengths."""

    def at(stage: Any, sides: list[list[float]], reference: float) -> tuple[float, list[float]]:
        segments = torch.tensor([number for number, side in enumerate(sides) for _ in side])
        ones = torch.ones(len(segments), dtype=F64)

        def pairs(logp: torch.Tensor) -> Comparisons:
            return Comparisons(
                logp=logp,
                weight=ones,
                segments=segments,
                entropy=ones,
                reference=reference * ones,
                documents=len(sides),
            )

        return _derived(stage, pairs, t(*[x for side in sides for x in side]))

    loss, gradient = at(preference(1.0), [[-0.1, -0.1], [-1.0, -1.0]], -0.2)
    assert loss == pytest.approx(0.15297762, abs=5e-8)
    assert gradient == pytest.approx([-0.14185107] * 2 + [0.14185107] * 2, abs=5e-8)
    assert at(preference(1.0, label_smoothing=0.1), [[-1.0], [-2.4]], -1.0)[0] == pytest.approx(0.36041743, abs=5e-8)
    assert at(preference(0.1), [[-10.0], [-12.0]], -11.0)[0] == pytest.approx(0.5981389, abs=5e-8)
    assert at(preference(0.1), [[-1.0, -1.0], [-1.0]], -1.0)[0] == pytest.approx(math.log(2), abs=1e-12)
    two = at(preference(1.0), [[-0.1, -0.1], [-1.0, -1.0], [-1.0], [-2.4]], -0.2)[0]
    right = -2.2  # the second pair: s = -.8 and -2.2
    second = math.log1p(math.exp(-(-0.8 - right)))
    assert two == pytest.approx((0.15297762 + second) / 2, abs=5e-8)
    loss, gradient = at(preference(0.1, loss="ipo"), [[-0.2], [-0.2, -0.2]], -0.2)
    assert loss == pytest.approx(25.0) and gradient == pytest.approx([-10.0, 5.0, 5.0])
    assert at(preference(1.0, loss="hinge"), [[-0.1, -0.1], [-1.0, -1.0]], -0.2) == (0.0, [0.0] * 4)
    loss, gradient = at(preference(0.5, loss="hinge"), [[-0.1, -0.1], [-1.0, -1.0]], -0.2)
    assert loss == pytest.approx(0.1) and gradient == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def sequence_values(sequence_clipped: Callable[..., Any]) -> None:
    """FIELDCASES L14 and L15, the packed row of the table of values, and both bounds."""

    def at(stage: Any, logp: Any, advantage: Any, segments: Any, rollout: Any = None) -> tuple[float, list[float]]:
        ones, zeros = torch.ones(len(logp), dtype=F64), torch.zeros(len(logp), dtype=F64)

        def actions(point: torch.Tensor) -> Actions:
            return Actions(
                logp=point,
                weight=ones,
                segments=torch.tensor(segments),
                entropy=ones,
                old=zeros,
                advantage=t(*advantage),
                rollout=None if rollout is None else t(*rollout),
                documents=max(segments) + 1,
            )

        return _derived(stage, actions, t(*logp))

    right = 1.1426308
    loss, gradient = at(sequence_clipped(0.9, 9.0), (0.2, -0.1, 0.3, 0.0), (1, 1, 1, -1), [0, 0, 0, 1])
    assert loss == pytest.approx((1 - right) / 2, abs=5e-8)
    assert gradient == pytest.approx([-right / 6] * 3 + [0.5], abs=5e-8)
    loss, _ = at(sequence_clipped(0.9, 9.0), (-0.01,) * 282, (1.0,) * 282, [0] * 282)
    assert loss == pytest.approx(-math.exp(-0.01), abs=1e-12)
    loss, gradient = at(sequence_clipped(), (0.0, 0.0, 0.0), (1, 1, -1), [0, 0, 1])
    assert loss == pytest.approx(0.0, abs=1e-15) and gradient == pytest.approx([-0.25, -0.25, 0.5])
    for logp, advantage, value, slope in (
        (0.1, 1.0, -1.0004, 0.0),
        (0.1, -1.0, math.exp(0.1), math.exp(0.1)),
        (-0.1, -1.0, 0.9997, 0.0),
        (-0.1, 1.0, -math.exp(-0.1), -math.exp(-0.1)),
    ):
        loss, gradient = at(sequence_clipped(), (logp,), (advantage,), [0])
        assert loss == pytest.approx(value, abs=1e-12) and gradient == pytest.approx([slope], abs=1e-12)
    # mean log weights of .2 over three tokens, and of 1, which is capped at 2
    corrected = sequence_clipped(0.9, 9.0, importance_cap=2.0)
    loss, gradient = at(corrected, (0.3, 0.0, 0.0, 0.0), (1, 1, 1, -1), [0, 0, 0, 1], (-0.4, -0.1, -0.1, -1.0))
    right = math.exp(0.2) * math.exp(0.1)
    assert loss == pytest.approx((2 - right) / 2, abs=1e-12)
    assert gradient == pytest.approx([-right / 6] * 3 + [1.0], abs=1e-12)


def gae_values(gae: Callable[..., Any]) -> None:
    """The rows of the table of values, FIELDCASES L19 and L20, and a tool's token between two of the response."""
    for reward, value, gamma, lam, expected in (
        ((0.0, 1.0), (0.2, 0.3), 1.0, 1.0, (0.8, 0.7)),
        ((0.0, 0.0, 1.0), (0.1, 0.2, 0.3), 1.0, 0.95, (0.82675, 0.765, 0.7)),
        ((0.0, 0.0, 1.0), (0.1, 0.2, 0.3), 0.99, 0.95, (0.808406675, 0.75535, 0.7)),
        ((0.0, 0.0, 1.0), (0.5, 0.4, 0.3), 1.0, 0.95, (0.43675, 0.565, 0.7)),
    ):
        r, v = t(*reward)[None], t(*value)[None]
        found, returns = gae(r, v, torch.ones_like(r, dtype=torch.bool), gamma=gamma, lam=lam)
        assert found[0].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[0].tolist() == pytest.approx([a + b for a, b in zip(expected, value, strict=True)], abs=1e-12)
    mask = torch.tensor([[True, False, True, False]])
    r, v = t(0.0, math.nan, 1.0, math.nan)[None], t(0.2, 9.0, 0.3, 9.0)[None]
    assert gae(r, v, mask, gamma=1.0, lam=1.0)[0][0].tolist() == pytest.approx([0.8, 0.0, 0.7, 0.0], abs=1e-12)
    assert gae(r, v, mask, gamma=0.0, lam=1.0)[0][0].tolist() == pytest.approx([-0.2, 0.0, 0.7, 0.0], abs=1e-12)


def value_values(value_clipped: Callable[..., Any]) -> None:
    """The row of the table of values, with its gradient, and a value that moved away from the return."""

    def at(value: Any, old: Any, returns: Any) -> tuple[float, list[float]]:
        ones, nowhere = torch.ones(len(value), dtype=F64), torch.zeros(len(value), dtype=torch.int64)

        def estimates(point: torch.Tensor) -> Estimates:
            return Estimates(value=point, old=t(*old), returns=t(*returns), weight=ones, segments=nowhere, documents=1)

        return _derived(value_clipped(0.5, coef=0.5), estimates, t(*value))

    loss, gradient = at((1.0, 0.2), (0.0, 0.0), (1.0, 1.0))
    assert loss == pytest.approx(0.11125, abs=1e-12) and gradient == pytest.approx([0.0, -0.2], abs=1e-12)
    loss, gradient = at((-1.0,), (0.0,), (1.0,))
    assert loss == pytest.approx(1.0, abs=1e-12) and gradient == pytest.approx([-1.0], abs=1e-12)


def corrected_values(clipped: Callable[..., Any]) -> None:
    """The dual clip of the table of values; importance weights e^.1, e^-.2 and 2, which is the cap."""

    def at(stage: Any, logp: Any, old: Any, advantage: Any, rollout: Any = None) -> tuple[float, list[float]]:
        ones, nowhere = torch.ones(len(logp), dtype=F64), torch.zeros(len(logp), dtype=torch.int64)

        def actions(point: torch.Tensor) -> Actions:
            return Actions(
                logp=point,
                weight=ones,
                segments=nowhere,
                entropy=ones,
                old=t(*old),
                advantage=t(*advantage),
                rollout=None if rollout is None else t(*rollout),
                documents=1,
            )

        return _derived(stage, actions, t(*logp))

    loss, gradient = at(clipped(dual=3.0), (-0.5, -0.5, -1.5), (-3, -3, -1), (-1, 1, 1))
    assert loss == pytest.approx(0.3978231, abs=5e-8)
    assert gradient == pytest.approx([0.0, 0.0, -0.2021769], abs=5e-8)
    loss, gradient = at(clipped(importance_cap=2.0), (-1, -1, -1), (-1, -1, -1), (1, 1, -1), (-1.1, -0.8, -3))
    weights = [math.exp(0.1), math.exp(-0.2), 2.0]
    assert loss == pytest.approx((-weights[0] - weights[1] + weights[2]) / 3, abs=1e-12)
    assert gradient == pytest.approx([-weights[0] / 3, -weights[1] / 3, weights[2] / 3], abs=1e-12)


def baseline_values(group_advantages: Callable[..., torch.Tensor]) -> None:
    """Rewards 1, 2, 6 of one group and 0, 1 of another, against the others and against the batch."""
    rewards, groups = t(1, 0, 2, 6, 1), torch.tensor([4, 2, 4, 4, 2])
    found = group_advantages(rewards, groups, baseline="leave_one_out", scale="none").tolist()
    assert found == pytest.approx([-3.0, -1.0, -1.5, 4.5, 1.0], abs=1e-6)
    spread = math.sqrt((1 + 4 + 0 + 16 + 1) / 5)
    found = group_advantages(rewards, groups, baseline="batch", scale="batch").tolist()
    assert found == pytest.approx([-1 / spread, -2 / spread, 0.0, 4 / spread, -1 / spread], abs=1e-6)


def whitened_values(whiten: Callable[..., torch.Tensor]) -> None:
    """1, 2, 3 and a masked NaN give -+1.2247449 and 0; equal numbers give 0; a narrow spread is not divided by."""
    values, mask = t(1, math.nan, 2, 3)[None], torch.tensor([[True, False, True, True]])
    root = math.sqrt(1.5)
    assert whiten(values, mask)[0].tolist() == pytest.approx([-root, 0.0, 0.0, root], abs=1e-12)
    assert whiten(t(5, 5, 5)[None], torch.ones(1, 3, dtype=torch.bool)).tolist() == [[0.0] * 3]
    narrow = whiten(t(0, 1e-6)[None], torch.ones(1, 2, dtype=torch.bool))
    assert narrow[0].tolist() == pytest.approx([-5e-7, 5e-7], abs=1e-12)
    two = whiten(t(1, 3, 5, 7).view(2, 2), torch.ones(2, 2, dtype=torch.bool))
    assert two.flatten().tolist() == pytest.approx([x / math.sqrt(5) for x in (-3, -1, 1, 3)], abs=1e-12)


def controlled_values(adapted: Callable[..., float]) -> None:
    """coef (1 + clip(measured / target - 1, -.2, .2) count / horizon)."""
    for measured, factor in ((6.0, 1.0), (6.6, 1.01), (600.0, 1.02), (0.0, 0.98), (5.7, 0.995)):
        found = adapted(0.2, measured, target=6.0, count=256, horizon=2560)
        assert found == pytest.approx(0.2 * factor, rel=1e-12)


def explained_values(explained: Callable[..., float]) -> None:
    """1 for a perfect critic and for one that is off by a constant, 0 for a constant one, 3/4 for half of the truth."""
    returns, mask = t(1, 2, 3, 50), torch.tensor([True, True, True, False])
    for values, right in (
        (t(1, 2, 3, -7), 1.0),
        (t(5, 6, 7, -7), 1.0),
        (t(7, 7, 7, -7), 0.0),
        (t(0.5, 1, 1.5, -7), 0.75),
        (t(-1, -2, -3, -7), -3.0),
    ):
        assert explained(values, returns, mask) == pytest.approx(right, abs=1e-12)
    assert explained(returns, t(2, 2, 2, 2), mask) == 0.0
