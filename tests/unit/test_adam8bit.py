"""AdamW with moments of one byte: what the bytes mean, how far a step may go, and that it resumes bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.ckpt.trees import load_tree, save_tree
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import AdamW8bitSpec, AdamWSpec
from areno_fn.steps.optimizers import adamw, adamw8bit, scale_by_adam8bit
from areno_fn.steps.optimizers.blockwise import dequantise, levels, quantise
from areno_fn.testing import laws

ONE = torch.tensor(1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_levels_are_a_constant_ratio_apart() -> None:
    """Signed: 127 from 1e-6 to 1, a ratio of 10^(6/126). Unsigned: 255 from 1e-12, 10^(12/254)."""
    like = torch.ones(1, dtype=torch.float64)
    for signed, count, ratio in ((True, 128, 10 ** (6 / 126)), (False, 256, 10 ** (12 / 254))):
        found = levels(signed, like)
        assert found.numel() == count and found[0] == 0 and found[-1] == 1
        assert (found[2:] / found[1:-1]).tolist() == pytest.approx([ratio] * (count - 2))


def test_what_is_on_a_level_stays_and_zero_is_zero() -> None:
    level = levels(True, torch.ones(1))
    values = torch.cat([level, -level[1:], torch.zeros(1)]) * 3.0
    assert values.numel() == 256
    stored = quantise(values, Key.of(0), ONE, signed=True)
    assert stored.codes.dtype == torch.uint8 and stored.scale.tolist() == [3.0]
    torch.testing.assert_close(dequantise(stored, signed=True), values, rtol=2e-7, atol=0)
    blank = quantise(torch.zeros(300), Key.of(0), ONE, signed=False)
    assert blank.scale.tolist() == [0, 0] and dequantise(blank, signed=False).count_nonzero() == 0


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_has_its_own_scale_and_rounding_is_to_a_neighbour(signed: bool) -> None:
    """Within a ratio of 10^(6/126) = 1.116, signed, or 10^(12/254) = 1.115; a large block leaves a small one alone."""
    values = draw(3, 200) * torch.tensor([[1.0], [1e-8], [1e8]])
    values = values if signed else values**2
    back = dequantise(quantise(values, Key.of(1), ONE, signed=signed), signed=signed)
    blocks = torch.arange(600).reshape(3, 200) // 256
    for number in range(3):
        mine, theirs = values[blocks == number], back[blocks == number]
        large = mine.abs() > 2e-6 * mine.abs().max()
        ratio = (theirs[large] / mine[large]).double()
        assert ratio.min() > 1 / 1.12 and ratio.max() < 1.12


def test_rounding_is_right_on_average() -> None:
    """Over 4000 draws the mean is within five standard errors, of a spread of at most half a level's width, 6 percent."""
    values = torch.tensor([1.0, 0.37, -0.0123, 4.4e-5])
    rounded = [dequantise(quantise(values, Key.of(0), torch.tensor(n), signed=True), signed=True) for n in range(4000)]
    mean = torch.stack(rounded).double().mean(0)
    assert ((mean / values - 1).abs() < 5 * 0.06 / math.sqrt(4000)).all()


def test_a_second_moment_never_becomes_zero() -> None:
    values = torch.tensor([1.0, 1e-20, 0.0])
    for n in range(20):
        found = dequantise(quantise(values, Key.of(0), torch.tensor(n), signed=False), signed=False)
        assert found[1] == pytest.approx(1e-12) and found[2] == 0


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.nan, math.inf):
        found = dequantise(quantise(torch.tensor([1.0, bad]), Key.of(0), ONE, signed=True), signed=True)
        assert not found.isfinite().all()


NUMBERS = st.floats(-(2.0**50), 2.0**50, width=32)


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=1, max_size=12),
    b1=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    b2=st.sampled_from([0.5, 0.95, 0.999]),
)
def test_no_step_is_larger_than_four_learning_rates(history: list[list[float]], b1: float, b2: float) -> None:
    """Whatever the gradients were, |p' - p| <= lr (4 + weight_decay |p|)."""
    spec = AdamW8bitSpec(lr=1e-3, betas=(b1, b2), weight_decay=0.1, decay="all", max_grad_norm=0.0)
    optimizer, params = adamw8bit(spec, 100), {"w": torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5], dtype=torch.float64)}
    state = optimizer.init(params)
    for gradient in history:
        moved, state, _ = optimizer.apply({"w": torch.tensor(gradient, dtype=torch.float64)}, state, params)
        assert ((moved["w"] - params["w"]).abs() <= 1e-3 * (4 + 0.1 * params["w"].abs()) * (1 + 1e-9)).all()
        params = moved


def test_a_small_gradient_beside_a_large_one_moves_by_a_learning_rate() -> None:
    """1e-4 of the largest: linear levels would have rounded both of its moments to 0."""
    transform = scale_by_adam8bit()
    params = {"w": torch.zeros(256)}
    gradient = {"w": torch.full((256,), 1e-4).index_fill(0, torch.tensor([0]), 1.0)}
    state = transform.init(params)
    for _ in range(50):
        moves, state = transform.update(gradient, state, params)
        assert ((moves["w"] - 1).abs() < 0.35).all()


def test_it_goes_where_adamw_goes() -> None:
    """On a quadratic with curvatures from 1 to 100, 200 steps leave a loss within a quarter of AdamW's first decrease."""
    curvature = torch.logspace(0, 2, 64)

    def loss_after(optimizer: Any) -> float:
        params = {"w": torch.ones(8, 64)}
        state = optimizer.init(params)
        for _ in range(200):
            params, state, _ = optimizer.apply({"w": curvature * params["w"]}, state, params)
        return float((curvature * params["w"] ** 2).sum())

    start = float(8 * curvature.sum())
    common = {"lr": 0.01, "weight_decay": 0.0, "max_grad_norm": 0.0, "betas": (0.9, 0.95)}
    exact, bytes_ = loss_after(adamw(AdamWSpec(**common), 200)), loss_after(adamw8bit(AdamW8bitSpec(**common), 200))  # type: ignore[arg-type]
    assert exact < 0.02 * start and bytes_ < exact + 0.02 * start


def test_the_first_update_is_adams_to_the_bit() -> None:
    """Nothing was stored before it."""
    params, gradient = {"w": draw(5, 7)}, {"w": draw(5, 7, seed=1)}
    exact = adamw(AdamWSpec(lr=1e-2), 10)
    bytes_ = adamw8bit(AdamW8bitSpec(lr=1e-2), 10)
    one, two = (o.apply(gradient, o.init(params), params)[0] for o in (exact, bytes_))
    torch.testing.assert_close(one["w"], two["w"], rtol=0, atol=1e-7)


def test_the_state_takes_a_byte_a_number_and_a_scale_a_block() -> None:
    state = scale_by_adam8bit().init({"w": torch.zeros(100, 100, dtype=torch.bfloat16)})
    for moment in (state.mu["w"], state.nu["w"]):
        assert moment.codes.dtype == torch.uint8 and moment.codes.shape == (100, 100)
        assert moment.scale.dtype == torch.float32 and moment.scale.shape == (40,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    def gradient(step: int, params: Any) -> Any:
        return tree.map(lambda leaf: leaf.float() + math.sin(step), params)

    def go(params: Any, state: Any, steps: range) -> Any:
        for step in steps:
            params, state, _ = optimizer.apply(gradient(step, params), state, params)
        return params, state

    optimizer = adamw8bit(AdamW8bitSpec(lr=1e-2), 20)
    params = {"w": draw(20, 30).to(dtype), "norm": draw(30, seed=1).to(dtype)}
    whole = go(params, optimizer.init(params), range(8))
    half = go(params, optimizer.init(params), range(3))
    save_tree(tmp_path / "state.safetensors", half)
    meta = tree.map(lambda leaf: leaf.to("meta"), half)
    assert tree.equal(go(*load_tree(tmp_path / "state.safetensors", meta), range(3, 8)), whole)


def test_equal_parameters_at_other_paths_round_differently_and_a_step_is_pure() -> None:
    params = {"a": draw(300), "b": draw(300)}
    transform = scale_by_adam8bit()
    _, state = laws.pure(transform.update, params, transform.init(params), params)
    assert not torch.equal(state.mu["a"].codes, state.mu["b"].codes)
    assert torch.equal(state.mu["a"].scale, state.mu["b"].scale)
