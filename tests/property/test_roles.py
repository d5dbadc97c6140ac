"""Laws of ownership on drawn roles: what is right passes, and every planted mistake is refused with the paths named."""

from __future__ import annotations

import pytest
import torch
from faults.role_plants import PLANTS, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import RecordError
from areno_fn.testing import strategies
from areno_fn.testing.role_strategies import RoleTrees


@given(strategies.role_trees())
def test_roles_that_are_right_pass(trees: RoleTrees) -> None:
    trees.check()


@given(strategies.role_trees())
def test_with_copies_for_snapshots_and_frozen_roles_every_role_may_be_moved_in_place(trees: RoleTrees) -> None:
    copied = {name: {k: torch.zeros(1) for k in own} for name, own in trees.snapshots.items()}
    trees.layout.check(trees.params, optim=trees.optim, snapshots=copied, in_place=trees.layout.trainable)


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
