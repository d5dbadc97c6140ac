"""Advantages of single tokens, whitening, the value loss and the KL controller against hand-worked numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from areno_fn.contracts.actions import Actions, Estimates
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.steps.kl_control import adapted_kl_coef
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.reduce import measure
from areno_fn.steps.returns import explained_variance, gae, terminal_rewards, whiten
from areno_fn.testing import laws

F64 = torch.float64


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def all_of(values: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(values, dtype=torch.bool)


@pytest.mark.parametrize(
    ("reward", "value", "gamma", "lam", "advantage", "returns"),
    [
        ([0.0, 1.0], [0.2, 0.3], 1.0, 1.0, [0.8, 0.7], [1.0, 1.0]),
        ([0.0, 0.0, 1.0], [0.1, 0.2, 0.3], 1.0, 0.95, [0.82675, 0.765, 0.7], [0.92675, 0.965, 1.0]),
        ([0.0, 0.0, 1.0], [0.1, 0.2, 0.3], 0.99, 0.95, [0.808406675, 0.75535, 0.7], [0.908406675, 0.95535, 1.0]),
    ],
)
def test_gae_of_the_table(reward: Any, value: Any, gamma: float, lam: float, advantage: Any, returns: Any) -> None:
    r, v = rows(reward), rows(value)
    found, target = gae(r, v, all_of(r), gamma=gamma, lam=lam)
    assert found[0].tolist() == pytest.approx(advantage, abs=1e-12)
    assert target[0].tolist() == pytest.approx(returns, abs=1e-12)


def test_L20_the_estimate_bootstraps_from_the_next_value() -> None:
    r, v = rows([0.0, 0.0, 1.0]), rows([0.5, 0.4, 0.3])
    assert gae(r, v, all_of(r), gamma=1.0, lam=0.95)[0][0].tolist() == pytest.approx([0.43675, 0.565, 0.7], abs=1e-12)


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [0.0, 1.0, 0.0]), (1.0, [1.0, 1.0, 0.0])])
def test_L19_a_terminal_reward_lands_on_the_last_response_token(gamma: float, expected: list[float]) -> None:
    mask = torch.tensor([[True, True, False]])
    rewards = terminal_rewards(torch.tensor([1.0]), mask)
    assert rewards.tolist() == [[0.0, 1.0, 0.0]]
    dirty = torch.tensor([[0.0, 0.0, math.nan]])
    assert gae(rewards + dirty, dirty, mask, gamma=gamma, lam=1.0)[0][0].tolist() == expected


@given(data=st.data(), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_L19_tokens_of_tools_and_padding_are_as_if_they_were_not_there(
    data: st.DataObject, gamma: float, lam: float
) -> None:
    length = data.draw(st.integers(1, 8))
    mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    reward, value = (torch.randn(1, length, generator=generator, dtype=F64) for _ in range(2))
    found, returns = gae(reward.masked_fill(~mask, math.nan), value.masked_fill(~mask, 7.0), mask, gamma=gamma, lam=lam)
    r, v = reward[mask].tolist(), value[mask].tolist()
    deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
    plain = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(v))) for t in range(len(v))]
    assert found[mask].tolist() == pytest.approx(plain, abs=1e-9)
    assert returns[mask].tolist() == pytest.approx([a + b for a, b in zip(plain, v, strict=True)], abs=1e-9)
    assert found[~mask].tolist() == [0.0] * int((~mask).sum())


def test_shapes_and_gradients_are_refused() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(RecordError, match=r"one shape \[B, T\], received \(1, 2\), \(1, 3\) and \(1, 2\)"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), mask)
    with pytest.raises(RecordError, match="values with a gradient"):
        gae(torch.zeros(1, 2), torch.zeros(1, 2, requires_grad=True), mask)
    with pytest.raises(RecordError, match=r"scores \[B\] and mask \[B, T\], received \(3,\) and \(1, 2\)"):
        terminal_rewards(torch.zeros(3), mask)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda mask: whiten(ONES, mask),
        lambda mask: gae(ONES, ONES, mask),
        lambda mask: terminal_rewards(ONES[:, 0], mask),
        lambda mask: explained_variance(ONES, ONES, mask),
    ],
)
def test_a_mask_is_of_booleans_and_of_the_shape_of_what_it_masks(call: Callable[[torch.Tensor], Any]) -> None:
    for dtype, shown in ((torch.int64, "i64"), (torch.float32, "f32"), (torch.uint8, "u8")):
        with pytest.raises(RecordError, match=rf"takes a mask of bool, received {shown}\[2,3\]; write mask != 0$"):
            call(torch.ones(2, 3, dtype=dtype))
    for shape in ((3,), (1, 3), (3, 2), (2, 3, 1), ()):
        with pytest.raises(RecordError, match=r"takes .* and mask .*received \(2,"):
            call(torch.ones(shape, dtype=torch.bool))
    call(torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("values", lambda x: whiten(x, ONES > 0)),
        ("rewards", lambda x: gae(x, ONES, ONES > 0)),
        ("values", lambda x: gae(ONES, x, ONES > 0)),
        ("scores", lambda x: terminal_rewards(x[:, 0], ONES > 0)),
        ("returns", lambda x: explained_variance(ONES, x, ONES > 0)),
    ],
)
def test_returns_are_made_of_data(name: str, call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(
        RecordError, match=f"was given {name} with a gradient; they are data recorded before the update$"
    ):
        call(ONES.clone().requires_grad_())
    with pytest.raises(RecordError, match=f"takes {name} of floating-point numbers, received i64"):
        call(ONES.long())


def test_whitening_is_by_the_mask_alone() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    assert whiten(values, mask)[0].tolist() == pytest.approx([-1.2247449, 0.0, 1.2247449, 0.0], abs=1e-6)
    assert whiten(torch.full((1, 3), 0.1), all_of(torch.zeros(1, 3))).tolist() == [[0.0, 0.0, 0.0]]
    near = whiten(rows([0.0, 1e-6]), all_of(rows([0.0, 0.0])))  # a spread of 5e-7
    assert near[0].tolist() == pytest.approx([-5e-7, 5e-7], abs=1e-12)
    assert whiten(values, torch.zeros_like(mask)).tolist() == [[0.0] * 4]


def test_explained_variance() -> None:
    returns, mask = rows([1.0, 2.0, 3.0, 50.0]), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0.0
    assert explained_variance(returns, returns, torch.zeros_like(mask)) == 0.0


def estimates(value: torch.Tensor, old: Any, returns: Any, weight: Any = None) -> Estimates:
    count = value.shape[0]
    return Estimates(
        value=value,
        old=torch.tensor(old, dtype=F64),
        returns=torch.tensor(returns, dtype=F64),
        weight=torch.ones(count, dtype=F64) if weight is None else torch.tensor(weight, dtype=F64),
        segments=torch.zeros(count, dtype=torch.int64),
        documents=1,
    )


def test_the_value_loss_of_the_table() -> None:
    point = torch.tensor([1.0, 0.2], dtype=F64, requires_grad=True)
    sums = value_clipped(0.5, coef=0.5)(estimates(point, [0.0, 0.0], [1.0, 1.0]))
    assert (sums.total / sums.weight).item() == pytest.approx(0.11125, abs=1e-15)
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    assert gradient.tolist() == pytest.approx([0.0, -0.2], abs=1e-15)  # 0.5 * 0.5 * 2 * (0.2 - 1) / 2
    assert float(measure(sums)["clip_fraction"]) == 0.5
    inside = value_clipped(0.5, coef=0.5)(estimates(torch.tensor([0.4], dtype=F64), [0.0], [1.0]))
    assert inside.total.item() == pytest.approx(0.25 * 0.36, abs=1e-15)


def test_the_value_loss_is_blind_to_what_is_masked_and_its_data_carry_no_gradient() -> None:
    clean = value_clipped()(estimates(torch.tensor([1.0], dtype=F64), [0.0], [2.0]))
    dirty = value_clipped()(
        estimates(torch.tensor([1.0, math.nan], dtype=F64), [0.0, math.inf], [2.0, math.nan], [1.0, 0.0])
    )
    assert (clean.total, clean.weight) == (dirty.total, dirty.weight)
    with pytest.raises(SpecError, match="clip > 0 and a finite coef > 0, received clip=0"):
        value_clipped(0)
    given = estimates(torch.ones(1, dtype=F64), [0.0], [1.0])
    given.returns.requires_grad_()
    with pytest.raises(RecordError, match=r"Estimates.returns carries a gradient"):
        value_clipped()(given)


def test_a_value_recorded_as_nan_is_no_reason_not_to_clip() -> None:
    """It makes the loss NaN, where the unclipped error alone would have hidden it."""
    point = torch.tensor([1.0, 0.2], dtype=F64, requires_grad=True)
    sums = value_clipped(0.5)(estimates(point, [math.nan, 0.0], [1.0, 1.0]))
    assert math.isnan(sums.total.item())
    for value, returns in ((math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(value_clipped()(estimates(torch.tensor([value], dtype=F64), [0.0], [returns])).total.item())


def test_the_value_loss_is_exact_under_any_split_and_has_the_gradient_of_its_value() -> None:
    source = torch.Generator().manual_seed(0)
    x, old, returns = (torch.randn(7, generator=source, dtype=F64) for _ in range(3))

    def objective(params: dict[str, torch.Tensor], part: slice) -> Any:
        value = params["w"] * x[part] + params["b"]
        return value_clipped(0.4)(estimates(value, old[part].tolist(), returns[part].tolist()))

    params = {"w": torch.tensor(0.7, dtype=F64), "b": torch.tensor(-0.2, dtype=F64)}
    cuts = [[slice(0, 2), slice(2, 7)], [slice(k, k + 1) for k in range(7)]]
    laws.exact_under_split(objective, params, slice(0, 7), *cuts, tolerance=1e-6)
    laws.gradient(objective, params, slice(0, 7), tolerance=1e-5)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(6.0, 0.2), (6.6, 0.2 * 1.01), (600.0, 0.2 * 1.02), (0.0, 0.2 * 0.98), (5.7, 0.2 * 0.995)],
)
def test_the_controller_moves_in_proportion_up_to_a_fifth(measured: float, expected: float) -> None:
    found = adapted_kl_coef(0.2, measured, target=6.0, count=256, horizon=2560)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_controller_without_a_target_is_refused() -> None:
    with pytest.raises(SpecError, match="target > 0 and 0 <= count <= horizon, received coef=0.1, target=0"):
        adapted_kl_coef(0.1, 1.0, target=0.0, count=1, horizon=10)


def test_reinforce_plus_plus_is_a_composition() -> None:
    """Rewards to go, with the KL of every token taken from its reward, whitened over the batch; -A logp at ratio 1."""
    mask = torch.tensor([[True, True], [True, False]])
    divergence = rows([0.5, -0.25], [1.0, 9.0])
    rewards = terminal_rewards(torch.tensor([1.0, 0.0], dtype=F64), mask) - 0.1 * divergence
    _, to_go = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)
    assert to_go[mask].tolist() == pytest.approx([0.975, 1.025, -0.1], abs=1e-12)
    advantage = whiten(to_go, mask)[mask]
    assert advantage.mean().item() == pytest.approx(0, abs=1e-12)
    assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-12)
    logp = torch.tensor([-0.3, -0.7, -1.1], dtype=F64, requires_grad=True)
    actions = Actions(
        logp=logp,
        weight=torch.ones(3, dtype=F64),
        segments=torch.tensor([0, 0, 1]),
        entropy=torch.zeros(3, dtype=F64),
        old=logp.detach().clone(),
        advantage=advantage,
        documents=2,
    )
    sums = clipped()(actions)
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, logp)
    torch.testing.assert_close(gradient, -advantage / 3)
