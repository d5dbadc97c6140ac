"""Averages of parameters against closed forms and PyTorch's own, and snapshots that nothing changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy_policy import Attention

from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.batch import JudgedRollout, Prompts
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.record import donate, record, replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import EMA, GRPO, AdamW8bitSpec, AdamWSpec, MuonSpec, Sampling, SGDSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.compose import train_step
from areno_fn.steps.optimizers.build import optimizer
from areno_fn.steps.recipes import ACTOR, REFERENCE, Algorithm, Materials, build
from areno_fn.steps.variants import (
    AVERAGE,
    SEEN,
    UPDATES,
    averaged,
    averaging,
    ema_begin,
    ema_decay,
    ema_params,
    ema_update,
    followed,
    snapshot,
)
from areno_fn.testing import laws
from areno_fn.testing.resume import Run

POLICY = Attention()
ROLES = RoleLayout(roles=(Role(name=ACTOR),))


# ------------------------------------------------------------------------------------- the arithmetic


@given(
    decay=st.floats(0.01, 0.99),
    ratio=st.floats(0.5, 1.5),
    steps=st.integers(1, 60),
)
def test_the_average_of_a_geometric_sequence_is_its_closed_form(decay: float, ratio: float, steps: int) -> None:
    """s_n = d^n + (1 - d) r (r^n - d^n) / (r - d), from s_0 = 1 and p_k = r^k."""
    if abs(ratio - decay) < 1e-3:
        ratio = decay + 1e-3
    moving = ema_begin({"w": torch.ones(3, dtype=torch.float64)})
    for step in range(1, steps + 1):
        moving = ema_update(moving, {"w": torch.full((3,), ratio**step, dtype=torch.float64)}, decay)
    expected = decay**steps + (1 - decay) * ratio * (ratio**steps - decay**steps) / (ratio - decay)
    torch.testing.assert_close(moving["w"], torch.full((3,), expected, dtype=torch.float64), rtol=1e-9, atol=0)


def test_two_updates_by_hand() -> None:
    average = ema_begin([torch.tensor([8.0, -4.0])])
    average = ema_update(average, [torch.tensor([0.0, 4.0])], 0.75)
    assert average[0].tolist() == [6.0, -2.0]
    average = ema_update(average, [torch.tensor([2.0, 2.0])], 0.5)
    assert average[0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_pytorchs_average(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(5, 4, dtype=dtype)
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # their first update copies
    ours = ema_begin(own)
    for _ in range(20):
        with torch.no_grad():
            for value in model.parameters():
                value += torch.randn(value.shape, generator=source, dtype=dtype)
        theirs.update_parameters(model)
        ours = ema_update(ours, {name: value.detach() for name, value in model.named_parameters()}, 0.9)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=tolerance, atol=tolerance)


def test_every_product_and_the_sum_are_rounded_once() -> None:
    source = np.random.default_rng(0)
    old, new = (source.standard_normal(1000).astype(np.float32) for _ in range(2))
    received = ema_update({"w": torch.from_numpy(old)}, {"w": torch.from_numpy(new)}, 0.999)["w"]
    assert np.array_equal(received.numpy(), old * np.float32(0.999) + new * np.float32(1 - 0.999))


SPECIAL = torch.tensor([0x7FC00001, -0x00400000, 0x7F800000, -0x80000000, 0x3F800000], dtype=torch.int64)


def test_0_copies_and_1_does_nothing_whatever_the_numbers_are() -> None:
    odd = {"w": SPECIAL.to(torch.int32).view(torch.float32)}  # NaNs with payloads, infinity, minus 0
    plain = {"w": torch.arange(5.0)}
    copied = ema_update(plain, odd, 0.0)
    assert tree.equal(copied, odd) and copied["w"].data_ptr() != odd["w"].data_ptr()
    assert ema_update(odd, plain, 1.0) is odd


def test_O1_an_average_of_bfloat16_moves_by_less_than_its_last_place() -> None:
    start, moved = torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 1.0078125, dtype=torch.bfloat16)
    average, low = ema_begin({"w": start}), start
    assert average["w"].dtype == torch.float32
    for _ in range(1000):
        average = ema_update(average, {"w": moved}, 0.999)
        low = low * 0.999 + moved * 0.001
    assert float(average["w"][0]) == pytest.approx(1 + 0.0078125 * (1 - 0.999**1000), abs=6e-5)
    assert low.tolist() == [1.0] * 4, "the mistake would show: in bfloat16 nothing moves"
    back = ema_params(average, {"w": start})
    assert back["w"].dtype == torch.bfloat16 and torch.equal(back["w"], moved)


def test_an_update_is_a_function() -> None:
    average = ema_begin({"a": torch.arange(6.0).reshape(2, 3).bfloat16(), "b": torch.ones(2)})
    laws.pure(ema_update, average, {"a": torch.ones(2, 3).bfloat16(), "b": torch.zeros(2)}, 0.9)


@pytest.mark.parametrize(
    ("average", "params", "decay", "words"),
    [
        ({"w": torch.ones(2)}, {"w": torch.ones(2)}, 1.5, "the decay of an average must be from 0 to 1, received 1.5"),
        ({"w": torch.ones(2)}, {"w": torch.ones(2)}, math.nan, "received nan"),
        ({"w": torch.ones(1)}, {"w": torch.ones(2)}, 0.5, r"w: the average is f32\[1\] and the parameter f32\[2\]"),
        ({"w": torch.ones(2).bfloat16()}, {"w": torch.ones(2).bfloat16()}, 0.5, r"begin it with ema_begin\(params\)"),
    ],
)
def test_what_is_no_update_is_refused(average: Any, params: Any, decay: float, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        ema_update(average, params, decay)


@pytest.mark.parametrize("other", [None, 3, 2.5, "w", torch.ones(3)])
def test_what_is_no_average_is_named(other: Any) -> None:
    mine = {"w": torch.ones(2)}
    for average, params in ((mine, {"w": other}), ({"w": other}, mine), ({"w": other}, {"w": None})):
        for decay in (0.0, 0.5, 1.0):
            with pytest.raises(
                RecordError, match=r"^w: the average is .* and the parameter .*; begin it with ema_begin"
            ):
                ema_update(average, params, decay)
        with pytest.raises(RecordError, match=r"^w: the average is .* and the parameter .*; begin it with ema_begin"):
            ema_params(average, params)


def test_other_structures_and_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="only in the second tree"):
        ema_update({"w": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(2)}, 0.5)
    with pytest.raises(RecordError, match=r"w is i64\[2\]; only floating-point tensors have an average"):
        ema_begin({"w": torch.ones(2, dtype=torch.int64)})


def test_leaves_that_are_one_tensor_stay_one() -> None:
    shared = torch.arange(3.0)
    tied = {"embed": shared, "head": shared}
    average = ema_begin(tied)
    for made in (snapshot(tied), average, ema_update(average, tied, 0.5), ema_params(average, tied)):
        assert made["embed"] is made["head"] and made["embed"] is not shared
    assert snapshot({"w": shared, "count": 3})["count"] == 3


# ------------------------------------------------------------------------------------- schedules, cadence


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (EMA(decay=0.9, schedule="constant"), [0.9, 0.9, 0.9]),
        (EMA(decay=0.9), [1 / 10, 2 / 11, 3 / 12]),
        (EMA(decay=0.15), [0.1, 0.15, 0.15]),
        (EMA(decay=0.8, schedule="linear", ramp=4), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 0.8]),
    ],
)
def test_a_schedule_is_a_function_of_the_updates_made(spec: EMA, expected: list[float]) -> None:
    assert [ema_decay(spec, n) for n in range(len(expected))] == expected
    assert ema_decay(spec, 10**6) == spec.decay


def at_step(value: float) -> TrainState:
    return TrainState(
        params={ACTOR: {"w": torch.tensor([value])}, "critic": {"w": torch.tensor([-value])}},
        optim={},
        snapshots={},
        counters=Counters(),
        key=Key.of(0),
        cursor=Cursor(),
    )


def followed_by(spec: EMA, values: Sequence[float], role: str = ACTOR) -> list[tuple[float, int, int]]:
    """The average, the steps and the updates behind every step of a sequence that begins at 1."""
    state, found = averaging(at_step(1.0), role), []
    for value in values:
        state = averaged(replace(state, params=at_step(value).params), spec, role)
        found.append((float(state.snapshots[AVERAGE]["w"]), state.controls[SEEN], state.controls[UPDATES]))
    return found  # type: ignore[return-value]


def test_cadence_and_start_by_hand() -> None:
    spec = EMA(decay=0.5, schedule="constant", every=2, start=3)
    assert followed_by(spec, [2.0, 3.0, 5.0, 7.0, 11.0, 13.0]) == [
        (1.0, 1, 0),  # between two updates nothing happens
        (3.0, 2, 0),  # before the start it is a copy
        (3.0, 3, 0),
        (5.0, 4, 1),  # 3 / 2 + 7 / 2
        (5.0, 5, 1),
        (9.0, 6, 2),  # 5 / 2 + 13 / 2
    ]


def test_it_is_the_average_of_the_role_that_is_asked_for() -> None:
    assert followed_by(EMA(decay=0.5, schedule="constant"), [3.0], "critic") == [(-2.0, 1, 1)]


# ------------------------------------------------------------------------------------- real storages


def overwriting(role_lr: float) -> Optimizer:
    """Moves parameters in place, as nothing but the receiver of a donated state may."""

    def apply(gradients: Any, state: Any, params: Any) -> tuple[Any, Any, dict[str, Any]]:
        tree.map(lambda p, g: p.sub_(role_lr * g), params, gradients)
        return params, state, {}

    return Optimizer(init=lambda params: {"none": torch.zeros(())}, apply=apply)


MOVERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: optimizer(AdamWSpec(lr=0.01), 9),
    "adamw8bit": lambda: optimizer(AdamW8bitSpec(lr=0.01), 9),
    "sgd": lambda: optimizer(SGDSpec(lr=0.01), 9),
    "muon": lambda: optimizer(MuonSpec(lr=0.01), 9),
    "overwriting": lambda: overwriting(0.01),
}


def begun(mover: str, ema: EMA | None = None, **settings: Any) -> tuple[Algorithm, TrainState]:
    spec = GRPO(samples=2, minibatches=2, kl_coef=0.1, sampling=Sampling(max_tokens=4), **settings)
    materials = Materials(policy=POLICY, optimizers={ACTOR: MOVERS[mover]()}, stop=(0,), ema=ema)
    algorithm = build(spec, materials)
    params = {ACTOR: POLICY.init()}
    start = TrainState(params=params, optim={}, snapshots={}, counters=Counters(), key=Key.of(3), cursor=Cursor())
    return algorithm, algorithm.begin(start)


def stepped(algorithm: Algorithm, state: TrainState) -> TrainState:
    assert algorithm.sample is not None
    prompts = Prompts(tokens=torch.tensor([[3, 4, 5], [6, 7, 1]]), lengths=torch.tensor([3, 2]), ids=torch.arange(2))
    rollout = algorithm.sample(state, prompts)
    batch = JudgedRollout(rollout=rollout, rewards=(rollout.tokens % 5).sum(1).float())
    state, _ = algorithm.step(donate(state), batch)
    return replace(state, cursor=replace(state.cursor, step=state.cursor.step + 1, total=state.cursor.total + 1))


def storages(params: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(params) if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize("mover", MOVERS)
def test_S2_a_snapshot_does_not_change_when_its_source_trains(mover: str) -> None:
    """An average at decay 1 is a snapshot as well; so both must be, after three donated steps, what they began as."""
    algorithm, state = begun(mover, EMA(decay=1.0, schedule="constant"))
    start = POLICY.init()
    for _ in range(3):
        laws.no_alias(ROLES, state, in_place=(ACTOR,))
        assert not storages(state.snapshots[REFERENCE]) & storages(state.snapshots[AVERAGE])
        state = stepped(algorithm, state)
    assert not tree.equal(state.params[ACTOR], start)
    assert tree.equal(state.snapshots[REFERENCE], start) and tree.equal(state.snapshots[AVERAGE], start)
    assert state.controls == {SEEN: 6, UPDATES: 6}


@pytest.mark.parametrize("mover", ["adamw", "overwriting"])
def test_the_average_in_a_phase_is_that_of_all_its_updates(mover: str) -> None:
    """Two mini-batches a step: noted by a mover that remembers, and averaged again in float64."""
    seen: list[Any] = []
    inner = MOVERS[mover]()

    def noting(gradients: Any, state: Any, params: Any) -> tuple[Any, Any, dict[str, Any]]:
        moved = inner.apply(gradients, state, params)
        seen.append(snapshot(moved[0]))
        return moved

    MOVERS["noting"] = lambda: Optimizer(init=inner.init, apply=noting)
    try:
        algorithm, state = begun("noting", EMA(decay=0.7, schedule="constant"))
        for _ in range(2):
            state = stepped(algorithm, state)
    finally:
        del MOVERS["noting"]
    expected = tree.map(torch.Tensor.double, POLICY.init())
    for params in seen:
        expected = tree.map(lambda s, p: 0.7 * s + 0.3 * p.double(), expected, params)
    assert len(seen) == 4
    for received, wanted in zip(tree.leaves(state.snapshots[AVERAGE]), tree.leaves(expected), strict=True):
        torch.testing.assert_close(received.double(), wanted, rtol=1e-6, atol=1e-7)


def test_a_reference_is_renewed_by_the_cursor_and_is_a_snapshot_again() -> None:
    algorithm, state = begun("overwriting", reference_every=2)
    for _ in range(5):
        before = (snapshot(state.snapshots[REFERENCE]), snapshot(state.params[ACTOR]))
        done = state.cursor.step + 1
        state = stepped(algorithm, state)
        if done % 2:
            assert tree.equal(state.snapshots[REFERENCE], before[0])
            assert not tree.equal(state.snapshots[REFERENCE], state.params[ACTOR])
        else:
            assert tree.equal(state.snapshots[REFERENCE], state.params[ACTOR])
            assert not storages(state.snapshots[REFERENCE]) & storages(state.params)


# ------------------------------------------------------------------------------------- resume


@record
class Point:
    x: torch.Tensor


def loss(params: Any, batch: Point) -> Sums:
    total = ((params["w"].float() - batch.x) ** 2).sum()
    return Sums(total=total, weight=torch.tensor(4.0), stats={}, peaks={})


@pytest.mark.parametrize(
    "spec",
    [EMA(decay=0.9), EMA(decay=0.9, schedule="linear", ramp=3, every=2), EMA(schedule="constant", start=4, every=3)],
)
@pytest.mark.parametrize("mover", [AdamWSpec(lr=0.1), MuonSpec(lr=0.1)], ids=["adamw", "muon"])
def test_a_run_with_an_average_that_is_stopped_is_the_run_that_is_not(spec: EMA, mover: Any) -> None:
    chosen = optimizer(mover, 8)
    update = followed(train_step(loss, chosen), spec)

    def start() -> TrainState:
        params = {"w": torch.arange(4.0).reshape(2, 2).bfloat16()}
        state = TrainState(
            params={ACTOR: params},
            optim={ACTOR: chosen.init(params)},
            snapshots={},
            counters=Counters(),
            key=Key.of(0),
            cursor=Cursor(),
        )
        return averaging(state)

    def step(state: TrainState, batch: Point) -> tuple[TrainState, Any]:
        state, metrics = update(state, [batch])
        return replace(state, cursor=replace(state.cursor, step=state.cursor.step + 1)), metrics

    def batch(state: TrainState) -> Point:
        return Point(x=torch.full((2, 2), float(state.cursor.step % 3)))

    last = laws.resume_exact(Run(start=start, batch=batch, step=step, steps=7))
    assert last.controls[SEEN] == 7 and not tree.equal(last.snapshots[AVERAGE], last.params[ACTOR])
