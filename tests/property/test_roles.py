"""Laws of ownership on drawn roles: what is right passes, and every planted mistake is refused with the paths named."""

from __future__ import annotations

import itertools

import pytest
import torch
from faults.role_plants import PLANTS, table
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.memory import overlaps, place
from areno_fn.testing import strategies
from areno_fn.testing.role_strategies import RoleTrees


@given(strategies.role_trees())
def test_roles_that_are_right_pass(trees: RoleTrees) -> None:
    trees.check()


@given(strategies.role_trees())
def test_with_copies_for_snapshots_and_frozen_roles_every_role_may_be_moved_in_place(trees: RoleTrees) -> None:
    copied = {name: {k: torch.zeros(1) for k in own} for name, own in trees.snapshots.items()}
    trees.layout.check(trees.params, optim=trees.optim, snapshots=copied, in_place=trees.layout.trainable)


@st.composite
def views(draw: st.DrawFn, count: int = 4) -> list[torch.Tensor]:
    """Views of one buffer with any strides, in two dtypes, of which two may be one."""
    buffer = torch.zeros(24, dtype=torch.uint8)
    made = []
    for _ in range(count):
        memory = buffer.view(draw(st.sampled_from([torch.uint8, torch.int32])))
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        strides = [draw(st.integers(0, 3)) for _ in shape]
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        assume(reach < memory.numel())
        made.append(memory.as_strided(shape, strides, draw(st.integers(0, memory.numel() - 1 - reach))))
    return made


@settings(max_examples=150)
@given(views())
def test_overlaps_are_what_a_write_shows(made: list[torch.Tensor]) -> None:
    """Against writing to every element of one and looking at the other."""
    places = [place(str(number), ("params", "actor"), view) for number, view in enumerate(made)]
    found = {(int(a.path), int(b.path)) for a, b in overlaps(places)}
    shown = set()
    for i, j in itertools.combinations(range(len(made)), 2):
        for at in itertools.product(*map(range, made[i].shape)):
            made[i][at] = 2**8 - 1 if made[i].dtype == torch.uint8 else -1  # every bit of every byte
        if bool((made[j] != 0).any()):
            shown.add((i, j))
        for at in itertools.product(*map(range, made[i].shape)):
            made[i][at] = 0
    assert found == shown


@pytest.mark.parametrize("kind", PLANTS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_a_planted_mistake_is_refused_with_its_place(kind: str, data: st.DataObject) -> None:
    refused, named = PLANTS[kind](data.draw)
    with pytest.raises(RecordError) as error:
        refused()
    missing = [name for name in named if name not in str(error.value)]
    assert not missing, f"{error.value} does not say {missing}"
    assert "\n" not in str(error.value)


def test_every_kind_of_mistake_has_a_sentence_of_its_own() -> None:
    said = table()
    print("\n".join(f"{name:58} {sentence}" for name, sentence in said.items()))
    assert said.keys() == PLANTS.keys() and len(said) >= 10
