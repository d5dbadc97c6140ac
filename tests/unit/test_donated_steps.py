"""Steps that are given their state for good: the same bits, in the same memory, and nobody left to see the old ones."""

from __future__ import annotations

import weakref
from typing import Any

import flow_recipe_toys
import pytest
import recipe_toys
import torch

from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.errors import DonatedError, RecordError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import (
    EMA,
    GRPO,
    PPO,
    AdamWSpec,
    Critic,
    Denoising,
    FlowAWM,
    FlowCRD,
    FlowDGPO,
    FlowDPPO,
    FlowGRPO,
    FlowGRPOGuard,
    FlowNFT,
    FlowOnlineDPO,
    FlowSFT,
    Group,
    MuonSpec,
    NoisyDenoising,
    Sampling,
    SGDSpec,
)
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.compose import train_step
from areno_fn.steps.donation import Alone
from areno_fn.steps.optimizers import optimizer
from areno_fn.steps.variants import averaging, followed, snapshot
from areno_fn.testing import laws

OPTIMIZERS = {
    "adamw": optimizer(AdamWSpec(lr=1e-2), 10),
    "stored": optimizer(AdamWSpec(lr=1e-2, states="stored"), 10),
    "groups": optimizer(AdamWSpec(lr=1e-2, groups=[Group(name="own", paths=["b"], lr=1e-1, weight_decay=0.0)]), 10),
    "sgd": optimizer(SGDSpec(lr=1e-2, momentum=0.9), 10),
    "muon": optimizer(MuonSpec(lr=1e-2), 10),
}


def squares(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Sums:
    error = (batch @ params["w"].float()).square().sum() + params["b"].float().square().sum()
    return Sums(total=error, weight=torch.tensor(float(len(batch))), stats={}, peaks={})


def started(moved: Optimizer) -> TrainState:
    source = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(8, 4, generator=source).bfloat16(), "b": torch.randn(4, generator=source)}
    return TrainState(
        params={"actor": params, "frozen": {"w": torch.ones(2)}},
        optim={"actor": moved.init(params)},
        snapshots={"reference": snapshot(params)},
        counters=Counters(),
        key=Key.of(0),
        cursor=Cursor(),
    )


def batches(number: int) -> list[torch.Tensor]:
    return [torch.randn(3, 8, generator=torch.Generator().manual_seed(9 + i)) for i in range(number)]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_donated_step_is_the_pure_step(name: str, micro: int) -> None:
    moved = OPTIMIZERS[name]
    pure, giving = train_step(squares, moved), train_step(squares, moved, donate=True)
    laws.donation_agrees(pure, giving, started(moved), [batches(micro)] * 3)


def test_adamw_moves_where_it_stands() -> None:
    """Parameters, masters and moments are there once: the new ones lie where the old ones lay."""
    moved = OPTIMIZERS["adamw"]
    state = started(moved)
    before = [x.data_ptr() for x in tree.leaves((state.params, state.optim))]
    after, _ = train_step(squares, moved, donate=True)(state, batches(1))
    assert [x.data_ptr() for x in tree.leaves((after.params, after.optim))] == before
    with pytest.raises(
        DonatedError,
        match="TrainState.params was read after this record was donated at .*test_donated_steps.py:[0-9]+, by .*compose.py:",
    ):
        assert state.params


def test_a_pure_step_leaves_its_state_readable_and_as_it_was() -> None:
    state = started(OPTIMIZERS["adamw"])
    kept = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    train_step(squares, OPTIMIZERS["adamw"])(state, batches(1))
    assert tree.equal(state, kept)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda s: replace(s, snapshots={"reference": s.params["actor"]}),
            "params.actor.w and snapshots.reference.w share memory, and 'actor' is updated in place; put a copy there",
        ),
        (
            lambda s: replace(s, params={**s.params, "frozen": {"w": s.params["actor"]["w"][2:]}}),
            "params.actor.w and params.frozen.w share memory",
        ),
        (
            lambda s: replace(s, optim={"actor": replace(s.optim["actor"], master={"w": s.params["actor"]["b"]})}),
            "params.actor.b and optim.actor.master.w are one tensor, which is updated in place; clone one of them",
        ),
        (
            lambda s: replace(s, params={"actor": overlapping()}),
            "params.actor.w and params.actor.b share memory, which is updated in place; clone one of them",
        ),
        (
            lambda s: replace(s, params={"actor": tree.map(lambda x: x.clone().requires_grad_(), s.params["actor"])}),
            r"params.actor.w requires a gradient, as parameters of a module do, and cannot be updated in place; put its detach",
        ),
        (
            lambda s: replace(s, params={"actor": in_inference()}),
            "params.actor.w was made in inference mode and cannot be updated in place; clone it outside of that",
        ),
        (
            lambda s: replace(s, params={"actor": {"w": s.params["actor"]["w"], "b": torch.ones(1).expand(4)}}),
            r"elements of params.actor.b stand in one place, as expand\(\) makes them, and 'actor' is updated in place; clone it",
        ),
    ],
)
def test_shared_memory_is_not_donated(change: Any, match: str) -> None:
    state = change(started(OPTIMIZERS["adamw"]))
    with pytest.raises(RecordError, match=match):
        train_step(squares, OPTIMIZERS["adamw"], donate=True)(state, batches(1))
    assert state.counters.optimizer_step == 0  # it was not handed over


def in_inference() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {"w": torch.ones(8, 4), "b": torch.ones(4)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loss_that_raises_leaves_the_state_as_it_was(name: str) -> None:
    calls: list[int] = []

    def failing(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Sums:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return squares(params, batch)

    moved = OPTIMIZERS[name]
    state, wanted = started(moved), started(moved)
    step = train_step(failing, moved, donate=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(state, batches(3))
    assert tree.equal(state, wanted)
    after, metrics = step(state, batches(3))
    expected, told = train_step(squares, moved)(wanted, batches(3))
    assert tree.equal(after, expected) and metrics == told
    with pytest.raises(DonatedError):
        assert state.params


def overlapping() -> dict[str, torch.Tensor]:
    memory = torch.randn(40, generator=torch.Generator().manual_seed(1))
    return {"w": memory[:32].view(8, 4), "b": memory[30:34]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leaves_side_by_side_in_one_storage_are_donated(name: str) -> None:
    moved, memory = OPTIMIZERS[name], torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def begun() -> TrainState:
        own = memory.clone()
        params = {"w": own[:, ::2], "b": own[0, 1::2]}
        return replace(started(moved), params={"actor": params}, optim={"actor": moved.init(params)})

    want, _ = train_step(squares, moved)(begun(), batches(1))
    got, _ = train_step(squares, moved, donate=True)(begun(), batches(1))
    assert tree.equal(want, got)


def test_no_micro_batch_is_refused_before_the_state_is_handed_over() -> None:
    state = started(OPTIMIZERS["adamw"])
    with pytest.raises(RecordError, match="a step needs at least one"):
        train_step(squares, OPTIMIZERS["adamw"], donate=True)(state, ())
    assert state.counters.optimizer_step == 0


def test_a_captured_step_is_a_donated_one() -> None:
    moved = OPTIMIZERS["adamw"]
    with pytest.raises(SpecError, match="write capture=True, donate=True"):
        train_step(squares, moved, capture=True)
    want, got = started(moved), started(moved)
    for _ in range(3):
        want, told = train_step(squares, moved)(want, batches(2))
        got, also = train_step(squares, moved, donate=True, capture=True)(got, batches(2))
        assert told == also and tree.equal(want, got)


def test_one_micro_batch_keeps_the_dtype_of_the_parameters() -> None:
    """A bfloat16 gradient of a single micro-batch is not copied; of several it is added up in float32."""
    seen: list[torch.dtype] = []
    moved = OPTIMIZERS["adamw"]

    def apply(gradient: Any, state: Any, params: Any) -> Any:
        seen.append(gradient["w"].dtype)
        return moved.apply(gradient, state, params)

    step = train_step(squares, Optimizer(init=moved.init, apply=apply))
    step(started(moved), batches(1))
    step(started(moved), batches(2))
    assert seen == [torch.bfloat16, torch.float32]


def test_a_float16_gradient_is_divided_after_it_is_made() -> None:
    """Through 1 / 2^18 a cotangent of 2^-12 would be 2^-30, which float16 does not have."""

    def tiny(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Sums:
        total = (params["w"] * batch.half()).sum().float() * 2**-12
        return Sums(total=total, weight=torch.tensor(2.0**18), stats={}, peaks={})

    moved = optimizer(SGDSpec(lr=1.0, momentum=0.0, max_grad_norm=0.0), 10)
    params = {"w": torch.zeros(1, dtype=torch.float16)}
    state = replace(started(moved), params={"actor": params}, optim={"actor": moved.init(params)}, snapshots={})
    after, _ = train_step(tiny, moved)(state, [torch.ones(1)])
    assert after.optim["actor"].master["w"].item() == -(2.0**-30)


DRAWN = Sampling(max_tokens=4)


@pytest.mark.parametrize(
    "spec",
    [
        GRPO(samples=2, sampling=DRAWN, kl_coef=0.1, minibatches=2, epochs=2, reference_every=1),
        GRPO(samples=2, sampling=DRAWN, importance_cap=2.0, minibatches=3),
        PPO(samples=2, sampling=DRAWN, kl_coef=0.1, minibatches=2, critic=Critic(updates=2)),
    ],
    ids=["grpo", "grpo corrected", "ppo"],
)
def test_algorithms_of_text_may_be_given_their_state(spec: Any) -> None:
    ends = []
    for donate in (False, True):
        algorithm, state = recipe_toys.begun(spec, rate=1e-2, donate=donate)
        told = []
        for _ in range(2):
            state, metrics = algorithm.step(state, recipe_toys.judged(algorithm, state))
            told.append(metrics)
        ends.append((state, told))
    assert tree.first_difference(*ends) is None


@pytest.mark.parametrize(
    "spec",
    [
        FlowSFT(),
        FlowGRPO(samples=4, denoising=NoisyDenoising(steps=3), kl_coef=0.1, minibatches=2),
        FlowNFT(samples=4, denoising=Denoising(steps=2), kl_coef=0.1, minibatches=2),
        FlowAWM(samples=4, denoising=Denoising(steps=2), epochs=2),
        FlowGRPOGuard(samples=4, denoising=NoisyDenoising(steps=3), minibatches=2),
        FlowDPPO(samples=4, denoising=NoisyDenoising(steps=3), epochs=2),
        FlowDGPO(samples=4, denoising=Denoising(steps=2), minibatches=2, draw_old=2),
        FlowCRD(samples=4, denoising=Denoising(steps=2), minibatches=2),
        FlowOnlineDPO(samples=4, denoising=Denoising(steps=2), minibatches=2),
    ],
)
def test_algorithms_of_flow_may_be_given_their_state(spec: Any) -> None:
    ends = []
    for donate in (False, True):
        algorithm = flow_recipe_toys.made(spec, optimizer(AdamWSpec(lr=1e-2), 10), donate=donate)
        state, told = flow_recipe_toys.state_of(algorithm), []
        for _ in range(2):
            sampled = algorithm.sample is not None
            batch = flow_recipe_toys.judged(algorithm, state) if sampled else flow_recipe_toys.clean()
            state, metrics = algorithm.step(state, batch)
            told.append(metrics)
        ends.append((state, told))
    assert tree.first_difference(*ends) is None


def test_an_average_follows_a_role_that_moves_where_it_stands() -> None:
    moved = OPTIMIZERS["adamw"]
    ends = []
    for donate in (False, True):
        update = followed(train_step(squares, moved, donate=donate), EMA(decay=0.5))
        state = averaging(started(moved))
        for number in range(3):
            state, _ = update(state, batches(number + 1))
        ends.append(state)
    assert tree.equal(*ends)


@pytest.mark.parametrize("where", ["snapshots", "params", "optim", "frozen"])
def test_what_was_let_pass_is_looked_at_again_where_a_tensor_is_another(where: str) -> None:
    moved = OPTIMIZERS["adamw"]
    alone, state = Alone(), started(moved)
    alone(state, "actor")
    alone(state, "actor")
    own = state.params["actor"]["w"]
    aliased = {
        "snapshots": {"snapshots": {"reference": {**state.snapshots["reference"], "w": own.detach()}}},
        "params": {"params": {**state.params, "actor": {"w": own, "b": own[0]}}},
        "optim": {"optim": {"actor": {"w": own}}},
        "frozen": {"params": {**state.params, "frozen": {"w": own[:1]}}},
    }[where]
    with pytest.raises(RecordError, match="share memory|are one tensor"):
        alone(replace(state, **aliased), "actor")
    alone(state, "actor")


def test_what_was_let_pass_is_not_kept_alive() -> None:
    alone, state = Alone(), started(OPTIMIZERS["adamw"])
    alone(state, "actor")
    leaf = weakref.ref(state.snapshots["reference"]["w"])
    state = replace(state, snapshots={})
    assert leaf() is None
    alone(state, "actor")
