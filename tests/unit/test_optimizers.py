"""Transforms and AdamW against torch's and against hand-worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from areno_fn import tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.spec import AdamW8bitSpec, AdamWSpec, Schedule, SGDSpec
from areno_fn.steps.optimizers import (
    adamw,
    add_decayed_weights,
    chain,
    clip_by_global_norm,
    clipping,
    global_norm,
    scale_by_adam,
    scale_by_learning_rate,
    with_master,
)
from areno_fn.steps.optimizers import optimizer as build
from areno_fn.steps.optimizers.master import MasterState
from areno_fn.steps.schedules import learning_rate

Params = dict[str, Any]


def make(dtype: torch.dtype, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "layers": [{"w": draw(5, 4), "norm": draw(4)}, {"w": draw(4, 3), "norm": draw(4)}],
        "bias": draw(3),
        "scale": draw(),
    }


def run(optimizer: Optimizer, params: Params, steps: int, gradients: Any) -> tuple[Params, Any]:
    state = optimizer.init(params)
    for step in range(steps):
        params, state, _ = optimizer.apply(gradients(step, params), state, params)
    return params, state


def reference(spec: AdamWSpec, params: Params, steps: int, gradients: Any, total: int) -> Params:
    """`clip_grad_norm_`, then `torch.optim.AdamW` with decay on matrices alone, the rate set by hand."""
    leaves = [torch.nn.Parameter(leaf.clone()) for leaf in tree.leaves(params)]
    decayed = [p for p in leaves if p.ndim >= 2]
    kept = [p for p in leaves if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    rate = learning_rate(spec.schedule, spec.lr, total)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1)
        current = tree.unflatten(params, [p.detach() for p in leaves])
        for p, g in zip(leaves, tree.leaves(gradients(step, current)), strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(leaves, spec.max_grad_norm or math.inf)
        optimizer.step()
    return tree.unflatten(params, [p.detach() for p in leaves])


def quadratic(step: int, params: Params) -> Params:
    """The gradient of a loss whose minimum moves: it depends on the parameters, so that errors would feed back."""
    return tree.map(lambda p: 2.0 * p + math.sin(step), params)


SPECS = {
    "defaults": AdamWSpec(lr=1e-2),
    "decay and tight clip": AdamWSpec(lr=1e-2, weight_decay=0.3, max_grad_norm=0.1, betas=(0.8, 0.95), eps=1e-6),
    "no clip": AdamWSpec(lr=3e-3, max_grad_norm=0.0, weight_decay=0.0),
    "scheduled": AdamWSpec(lr=1e-2, weight_decay=0.1, schedule=Schedule(kind="cosine", warmup_steps=10, min_lr=1e-4)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_adamw_equals_torch_over_100_steps(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Float64 to 1e-12 of the largest weight; float32 to 1e-5, about 80 roundings of 2^-23."""
    params = make(dtype)
    ours, _ = run(adamw(SPECS[name], 100), params, 100, quadratic)
    theirs = reference(SPECS[name], params, 100, quadratic, 100)
    largest = max(float(leaf.abs().max()) for leaf in tree.leaves(params))
    for (path, a), b in zip(tree.leaves_with_path(ours), tree.leaves(theirs), strict=True):
        assert a.dtype == dtype
        assert float((a - b).abs().max()) <= tolerance * largest, path
    assert not tree.equal(ours, params)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_clip_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    for limit in (0.1, 1.0, 1e3, math.inf):
        gradient = make(dtype, seed=3)
        leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in tree.leaves(gradient)]
        for p, g in zip(leaves, tree.leaves(gradient), strict=True):
            p.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(leaves, limit)
        transform = clip_by_global_norm(limit)
        clipped, state = transform.update(gradient, transform.init(gradient), gradient)
        assert state.norm.item() == pytest.approx(norm.item(), rel=1e-6)
        for a, p in zip(tree.leaves(clipped), leaves, strict=True):
            torch.testing.assert_close(a, p.grad, rtol=tolerance, atol=0)


def test_clip_by_hand() -> None:
    transform = clip_by_global_norm(1.0)
    gradient = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    clipped, state = transform.update(gradient, transform.init(gradient), gradient)
    assert state.norm.item() == 5.0 and clipped["a"].item() == pytest.approx(3 / (5 + 1e-6), rel=1e-6)
    small = {"a": torch.tensor([0.3]), "b": torch.tensor([0.4])}
    assert tree.equal(transform.update(small, state, small)[0], small)
    zero = tree.map(torch.zeros_like, small)
    assert tree.equal(transform.update(zero, state, zero)[0], zero)
    with pytest.raises(SpecError, match=r"needs a limit above 0, not 0\.0; use math\.inf"):
        clip_by_global_norm(0.0)


@pytest.mark.parametrize("kind", [AdamWSpec, AdamW8bitSpec, SGDSpec])
def test_a_norm_beyond_float32_does_not_change_a_gradient_that_is_not_clipped(kind: Any) -> None:
    """Infinity over infinity is NaN: it made every parameter one, where the specification says not to clip."""
    gradient = {"w": torch.full((300,), 1e19).index_fill_(0, torch.tensor([5]), 1.0)}
    transform = clipping(0.0)
    clipped, state = transform.update(gradient, transform.init(gradient), gradient)
    assert float(state.norm) == math.inf and tree.equal(clipped, gradient)
    optimizer = build(kind(lr=1e-3, max_grad_norm=0.0), 10)
    params = {"w": torch.ones(300)}
    optimizer_state = optimizer.init(params)
    for _ in range(3):
        params, optimizer_state, told = optimizer.apply(gradient, optimizer_state, params)
        assert bool(params["w"].isfinite().all()) and float(told["grad_norm"]) == math.inf
    held, _ = clip_by_global_norm(1.0).update(gradient, state, gradient)
    assert not held["w"].any()


def test_the_norm_of_low_precision_is_taken_in_float32() -> None:
    gradient = {f"{i}": torch.full((1000,), 300.0, dtype=torch.float16) for i in range(10)}
    assert global_norm(gradient).item() == pytest.approx(3e4, rel=1e-6)


def test_the_first_adam_update_is_the_sign_of_the_gradient() -> None:
    transform = scale_by_adam()
    gradient = {"w": torch.tensor([1e-3, -5.0, 0.0], dtype=torch.float64)}
    update, state = transform.update(gradient, transform.init(gradient), gradient)
    expected = [1e-3 / (1e-3 + 1e-8), -5 / (5 + 1e-8), 0.0]
    assert update["w"].tolist() == pytest.approx(expected, rel=1e-12)
    assert state.count.item() == 1 and state.mu["w"].tolist() == pytest.approx([1e-4, -0.5, 0.0])


def test_decay_is_for_matrices_unless_a_mask_says_otherwise() -> None:
    params = {"w": torch.full((2, 2), 2.0), "norm": torch.full((2,), 2.0), "scale": torch.tensor(2.0)}
    zero = tree.map(torch.zeros_like, params)
    update, state = add_decayed_weights(0.1).update(zero, (), params)
    assert state == () and update["w"].tolist() == [[pytest.approx(0.2)] * 2] * 2
    assert update["norm"].tolist() == [0, 0] and update["scale"].item() == 0
    by_name = add_decayed_weights(0.1, lambda path, leaf: path == "norm").update(zero, (), params)[0]
    assert by_name["w"].sum().item() == 0 and by_name["norm"].tolist() == pytest.approx([0.2, 0.2])
    assert tree.equal(add_decayed_weights(0.0).update(zero, (), params)[0], zero)


def test_chain_runs_in_order_and_keeps_every_state() -> None:
    params = {"w": torch.tensor([2.0])}
    transform = chain(add_decayed_weights(1.0, lambda path, leaf: True), scale_by_learning_rate(0.5))
    update, state = transform.update({"w": torch.tensor([4.0])}, transform.init(params), params)
    assert update["w"].item() == -3.0 and len(state) == 2 and state[1].count.item() == 1


def test_the_optimizer_reports_norm_and_rate() -> None:
    params = {"w": torch.tensor([1.0, 1.0])}
    optimizer = adamw(AdamWSpec(lr=0.5, schedule=Schedule(kind="linear", warmup_steps=2)), 10)
    state = optimizer.init(params)
    for expected in (0.25, 0.5, 0.4375):
        params, state, stats = optimizer.apply({"w": torch.tensor([3.0, 4.0])}, state, params)
        assert stats["grad_norm"].item() == 5.0 and stats["lr"].item() == expected and set(stats) == {"grad_norm", "lr"}


def test_O9_a_resumed_optimizer_continues_its_schedule() -> None:
    """Saved at 3 and resumed from the leaves alone: step 4 and all later ones are the uninterrupted run's."""
    spec = AdamWSpec(lr=1e-2, schedule=Schedule(kind="cosine", warmup_steps=2, min_lr=1e-4))
    whole, whole_state = run(adamw(spec, 8), make(torch.bfloat16), 8, quadratic)
    params, state = run(adamw(spec, 8), make(torch.bfloat16), 3, quadratic)
    saved = {path: leaf.clone() for path, leaf in tree.leaves_with_path((params, state))}
    resumed = adamw(spec, 8)
    fresh = (make(torch.bfloat16), resumed.init(make(torch.bfloat16)))
    params, state = tree.map_with_path(lambda path, _: saved[path], fresh)
    for step in range(3, 8):
        params, state, stats = resumed.apply(quadratic(step, params), state, params)
        assert stats["lr"].item() == learning_rate(spec.schedule, spec.lr, 8)(step + 1)
    assert tree.equal((params, state), (whole, whole_state))


@pytest.mark.parametrize(("steps", "rate", "right"), [(100, 6e-4, 0.94), (1000, 1e-6, 0.999)])
@pytest.mark.parametrize("kind", ["descent", "adamw"])
def test_O1_small_updates_of_bfloat16_weights_are_kept(steps: int, rate: float, right: float, kind: str) -> None:
    spec = AdamWSpec(lr=rate, weight_decay=0.0, max_grad_norm=0.0)
    optimizer = with_master(scale_by_learning_rate(rate)) if kind == "descent" else adamw(spec, steps)
    params, state = run(
        optimizer, {"norm": torch.ones(4, dtype=torch.bfloat16)}, steps, lambda _, p: tree.map(torch.ones_like, p)
    )
    assert state.master["norm"].tolist() == pytest.approx([right] * 4, abs=2e-5)
    assert params["norm"].dtype == torch.bfloat16 and torch.equal(params["norm"], state.master["norm"].bfloat16())
    alone = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(steps):
        alone = alone - torch.tensor(rate, dtype=torch.bfloat16)
    assert alone.tolist() == [1.0] * 4


def test_O1_at_a_rate_of_1e_6_no_bfloat16_weight_from_4_9e_4_on_moves_and_every_master_does() -> None:
    """All finite positive bfloat16 numbers from 2^-13 to 4; below 2^-11 = 4.88e-4 half a step of them is less than 1e-6."""
    bits = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    weights = bits[(bits >= 2.0**-13) & (bits <= 4)]
    params = {"w": weights}
    optimizer = with_master(scale_by_learning_rate(1e-6))
    moved, state, _ = optimizer.apply({"w": torch.ones(len(weights))}, optimizer.init(params), params)
    still = moved["w"] == weights
    assert still[weights.float() >= 4.9e-4].all() and not still[weights.float() < 4.88e-4].any()
    small = weights.float() <= 2.0  # beyond, float32 rounds 1e-6 to 9.5e-7 or to 1.2e-6
    torch.testing.assert_close(
        (weights.float() - state.master["w"])[small], torch.full((int(small.sum()),), 1e-6), rtol=0.2, atol=0
    )


def test_O12_autocast_has_no_old_copy_of_new_weights() -> None:
    """An update writes no weight in place, so that a cast kept by autocast is never one of a weight that has changed."""
    x, target = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(2, 3, 8).view(4, 2)
    start = {"w": torch.linspace(-0.5, 0.5, 6).view(3, 2)}
    optimizer = adamw(AdamWSpec(lr=0.1, weight_decay=0.0), 10)

    def loss(params: Params) -> torch.Tensor:
        return ((x @ params["w"]).float() - target).square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        leaf = {"w": start["w"].clone().requires_grad_()}
        first = loss(leaf)
        (slope,) = torch.autograd.grad(first, leaf["w"])
        moved, _, _ = optimizer.apply({"w": slope}, optimizer.init(leaf), leaf)
        second = loss({"w": moved["w"].detach().requires_grad_()})
        reference = loss(leaf)
        with torch.no_grad():
            leaf["w"].add_(1.0)
        stale = loss(leaf)
    with torch.autocast("cpu", torch.bfloat16):
        assert second.item() == loss({"w": moved["w"].detach().requires_grad_()}).item()
    assert second < 0.99 * first and reference.item() == first.item()
    assert stale.item() == first.item(), "what an update in place would give: autocast keeps the old cast"


def test_O2_the_cast_copy_is_never_the_source_of_truth() -> None:
    optimizer = with_master(scale_by_learning_rate(1.0))
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    gradient = {"w": torch.tensor([1e-3])}
    moved, state, _ = optimizer.apply(gradient, optimizer.init(params), params)
    assert state.master["w"].item() == pytest.approx(0.999, abs=1e-7) and moved["w"].item() == 1.0
    tampered = {"w": torch.full((1,), 7.0, dtype=torch.bfloat16)}
    _, state, _ = optimizer.apply(gradient, state, tampered)
    assert state.master["w"].item() == pytest.approx(0.998, abs=1e-7)


def test_float32_parameters_have_no_second_copy() -> None:
    params = {
        "w": torch.ones(2, 2),
        "norm": torch.ones(2, dtype=torch.bfloat16),
        "d": torch.ones(2, dtype=torch.float64),
    }
    optimizer = adamw(AdamWSpec(lr=0.1), 10)
    state = optimizer.init(params)
    assert set(state.master) == {"norm"}
    params, state, _ = optimizer.apply(tree.map(torch.ones_like, params), state, params)
    assert set(state.master) == {"norm"} and [params[k].dtype for k in params] == [
        torch.float32,
        torch.bfloat16,
        torch.float64,
    ]


def test_moments_and_masters_are_float32_trees_like_the_parameters() -> None:
    params = make(torch.bfloat16)
    state = adamw(AdamWSpec(), 10).init(params)
    _, adam, _, _ = state.inner
    for moment in (adam.mu, adam.nu):
        assert [p for p, _ in tree.leaves_with_path(moment)] == [p for p, _ in tree.leaves_with_path(params)]
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(moment))
    paths = [path for path, _ in tree.leaves_with_path(state)]
    assert "inner.1.mu.layers.0.w" in paths and "master.layers.0.w" in paths
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(state))
    storages = [leaf.untyped_storage().data_ptr() for leaf in tree.leaves((params, state))]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_written_to_and_two_calls_agree(dtype: torch.dtype) -> None:
    optimizer = adamw(SPECS["decay and tight clip"], 100)
    params = make(dtype)
    _, state = run(optimizer, params, 3, quadratic)
    gradient = tree.map(lambda leaf: leaf.float(), quadratic(3, params))
    before = tree.map(torch.clone, (gradient, state, params))
    first, second = optimizer.apply(gradient, state, params), optimizer.apply(gradient, state, params)
    assert tree.equal((gradient, state, params), before) and tree.equal(first, second)


def test_bfloat16_gradients_are_taken_to_float32() -> None:
    params = make(torch.bfloat16)
    gradient = make(torch.bfloat16, seed=1)
    optimizer = adamw(AdamWSpec(lr=1e-2), 10)
    low = optimizer.apply(gradient, optimizer.init(params), params)
    wide = optimizer.apply(tree.map(lambda g: g.float(), gradient), optimizer.init(params), params)
    assert tree.equal(low, wide)


def test_what_cannot_be_moved_is_refused() -> None:
    optimizer = adamw(AdamWSpec(), 10)
    with pytest.raises(
        RecordError, match=r"parameter table is of torch\.int64; an optimizer moves floating-point tensors"
    ):
        optimizer.init({"w": torch.ones(1), "table": torch.arange(3)})
    with pytest.raises(RecordError, match="was given no parameters"):
        optimizer.init({})
    params = {"w": torch.ones(1)}
    with pytest.raises(RecordError, match="the gradient is not made like the parameters: .* at w: only in the first"):
        optimizer.apply({"v": torch.ones(1)}, optimizer.init(params), params)


def test_a_transform_of_ones_own_joins_a_chain() -> None:
    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tree.map(torch.sign, updates), state + 1

    sign = Transform(init=lambda params: torch.zeros((), dtype=torch.int64), update=update)
    optimizer = with_master(chain(sign, scale_by_learning_rate(0.25)))
    params, state = run(optimizer, {"w": torch.tensor([1.0, -1.0])}, 2, lambda _, p: p)
    assert params["w"].tolist() == [0.5, -0.5] and state.inner[0].item() == 2 and isinstance(state, MasterState)


@pytest.mark.traced
def test_an_update_compiles_as_one_graph_and_is_not_traced_again() -> None:
    optimizer = adamw(SPECS["scheduled"], 100)
    counter = CompileCounter()
    apply = torch.compile(optimizer.apply, fullgraph=True, backend=counter)
    params = expected = make(torch.bfloat16)
    state = expected_state = optimizer.init(params)
    for step in range(4):
        params, state, _ = apply(quadratic(step, params), state, params)
        expected, expected_state, _ = optimizer.apply(quadratic(step, expected), expected_state, expected)
    assert counter.frame_count == 1 and tree.equal((params, state), (expected, expected_state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_leaf_changes_its_dtype(dtype: torch.dtype) -> None:
    """A leaf of no dimensions would take the dtype of a float64 scalar that it is multiplied by."""
    params = {**make(dtype), "other": torch.ones((), dtype=torch.float64), "half": torch.ones((), dtype=torch.float16)}
    optimizer = adamw(SPECS["scheduled"], 100)
    state = optimizer.init(params)
    moved, after, _ = optimizer.apply(quadratic(0, params), state, params)
    kinds = [(path, leaf.dtype, leaf.shape) for path, leaf in tree.leaves_with_path((params, state))]
    assert [(path, leaf.dtype, leaf.shape) for path, leaf in tree.leaves_with_path((moved, after))] == kinds
