"""`TrainState`: one record that holds everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.errors import DonatedError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import donate, replace
from areno_fn.contracts.state import Counters, Cursor, TrainState


def state(**changes: Any) -> TrainState:
    fields = {
        "params": {"actor": {"w": torch.ones(2)}},
        "optim": {"actor": {"w": torch.zeros(2)}},
        "snapshots": {"reference": {"w": torch.ones(2)}},
        "counters": Counters(),
        "key": Key.of(1),
        "cursor": Cursor(),
    }
    return TrainState(**{**fields, **changes})


def test_everything_in_a_state_has_a_path() -> None:
    assert [path for path, _ in tree.leaves_with_path(state())] == [
        "params.actor.w",
        "optim.actor.w",
        "snapshots.reference.w",
        "counters.optimizer_step",
        "counters.rollout_iteration",
        "counters.data_epoch",
        "key.seed",
        "key.counter",
        "cursor.phase",
        "cursor.step",
        "cursor.epoch",
        "cursor.batch",
        "cursor.total",
    ]


def test_a_state_needs_every_part() -> None:
    with pytest.raises(TypeError, match="snapshots"):
        TrainState(params={}, optim={}, counters=Counters(), key=Key.of(0), cursor=Cursor())  # type: ignore[call-arg]
    with pytest.raises(RecordError, match=r"TrainState\.params"):
        state(params=[torch.ones(1)])


def test_S2_a_step_leaves_the_state_it_was_given() -> None:
    """minimind#775: the old policy is not the trained one."""

    def step(value: TrainState) -> TrainState:
        _, slope = value_and_grad(lambda p: (p["w"] ** 2).sum())(value.params["actor"])
        moved = tree.map(lambda p, g: p - 0.1 * g, value.params["actor"], slope)
        return replace(value, params={"actor": moved}, counters=value.counters.advance_optimizer())

    old = state()
    new = step(old)
    assert torch.equal(old.params["actor"]["w"], torch.ones(2)) and old.counters.optimizer_step == 0
    assert torch.equal(new.params["actor"]["w"], torch.full((2,), 0.8)) and new.counters.optimizer_step == 1
    assert tree.equal(new.snapshots, old.snapshots) and tree.equal(new.key, old.key)


def test_a_donated_state_is_dead_and_its_successor_lives() -> None:
    old = state()
    new = donate(old)
    assert torch.equal(new.params["actor"]["w"], torch.ones(2))
    with pytest.raises(DonatedError, match=r"TrainState\.params was read after this record was donated"):
        _ = old.params
