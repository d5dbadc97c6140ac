"""C3, C4: three clocks, none derived from another; and the cursor."""

from __future__ import annotations

import pytest
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.execution import CycleUnit
from areno_fn.contracts.state import Counters, Cursor

naturals = st.integers(0, 2**40)
counters = st.builds(Counters, optimizer_step=naturals, rollout_iteration=naturals, data_epoch=naturals)


def triple(value: Counters) -> tuple[int, int, int]:
    return value.optimizer_step, value.rollout_iteration, value.data_epoch


def test_C3_a_run_starts_at_zero() -> None:
    assert triple(Counters()) == (0, 0, 0)
    assert (Cursor().phase, Cursor().step, Cursor().epoch, Cursor().batch) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["optimizer_step", "rollout_iteration", "data_epoch"])
@pytest.mark.parametrize("value", [-1, True, False])
def test_C3_only_naturals_count_and_a_bool_is_none(name: str, value: int) -> None:
    with pytest.raises(RecordError, match=rf"Counters\.{name} must be an integer of at least 0, received {value}"):
        Counters(**{name: value})


@pytest.mark.parametrize("value", [1.0, "1", None])
def test_C3_other_types_are_refused(value: object) -> None:
    with pytest.raises(RecordError, match=r"Counters\.optimizer_step"):
        Counters(optimizer_step=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["phase", "step", "epoch", "batch", "total"])
def test_D13_a_cursor_holds_naturals(name: str) -> None:
    assert getattr(Cursor(**{name: 7}), name) == 7
    with pytest.raises(RecordError, match=rf"Cursor\.{name} must be an integer of at least 0, received -1"):
        Cursor(**{name: -1})


@given(counters)
def test_C3_a_cycle_advances_its_own_clock_alone(value: Counters) -> None:
    step, rollout, epoch = triple(value)
    assert triple(value.advance_cycle(CycleUnit.ROLLOUT_ITERATION)) == (step, rollout + 1, epoch)
    assert triple(value.advance_cycle(CycleUnit.DATA_EPOCH)) == (step, rollout, epoch + 1)
    assert triple(value) == (step, rollout, epoch)


@given(counters, st.integers(1, 1000))
def test_C3_an_update_advances_the_optimizer_clock_alone(value: Counters, steps: int) -> None:
    step, rollout, epoch = triple(value)
    assert triple(value.advance_optimizer(steps)) == (step + steps, rollout, epoch)
    assert triple(value.advance_optimizer()) == (step + 1, rollout, epoch)


@pytest.mark.parametrize("steps", [0, -1, True])
def test_C3_an_update_counts_at_least_one_step(steps: int) -> None:
    with pytest.raises(RecordError, match=rf"Counters\.advance_optimizer: steps must be at least 1, received {steps}"):
        Counters().advance_optimizer(steps)


def test_C3_every_cycle_unit_names_a_clock() -> None:
    assert all(hasattr(Counters(), unit.value) for unit in CycleUnit)


@given(st.lists(st.sampled_from(["optimizer", *CycleUnit]), max_size=30))
def test_C4_the_clocks_count_their_own_events_in_any_order(events: list[str]) -> None:
    value = Counters()
    for event in events:
        value = value.advance_cycle(event) if isinstance(event, CycleUnit) else value.advance_optimizer()
    expected = tuple(events.count(name) for name in ("optimizer", CycleUnit.ROLLOUT_ITERATION, CycleUnit.DATA_EPOCH))
    assert triple(value) == expected


@given(counters)
def test_C4_any_triple_survives_taking_apart_and_putting_together(value: Counters) -> None:
    leaves, structure = pytree.tree_flatten(value)
    assert leaves == list(triple(value))
    assert tree.equal(pytree.tree_unflatten(leaves, structure), value)
