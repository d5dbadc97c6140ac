"""A draw is a function of its coordinates: the same under slicing, permutation, broadcasting and splitting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import random
from areno_fn.contracts.key import Key
from areno_fn.testing import strategies

Draw = Callable[..., torch.Tensor]
coordinate = st.integers(-(2**63), 2**63 - 1)
rows = st.lists(coordinate, min_size=1, max_size=6).map(torch.tensor)


@pytest.mark.parametrize("draw", [random.words, random.uniform, random.normal, random.gumbel])
class TestCoordinates:
    @given(key=strategies.keys(), ids=rows, positions=rows)
    def test_broadcast_equals_one_by_one(
        self, draw: Draw, key: Key, ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        table = draw(key, ids[:, None], positions)
        assert table.shape == (len(ids), len(positions))
        for i, a in enumerate(ids):
            for j, b in enumerate(positions):
                assert torch.equal(table[i, j], draw(key, a, b))

    @given(key=strategies.keys(), ids=rows, data=st.data())
    def test_slices_and_permutations_of_a_batch(
        self, draw: Draw, key: Key, ids: torch.Tensor, data: st.DataObject
    ) -> None:
        position = torch.tensor(data.draw(coordinate))
        whole = draw(key, ids, position)
        order = torch.tensor(data.draw(st.permutations(range(len(ids)))))
        assert torch.equal(draw(key, ids[order], position), whole[order])
        cut = data.draw(st.integers(0, len(ids)))
        assert torch.equal(draw(key, ids[cut:], position), whole[cut:])

    @given(key=strategies.keys(), data=st.data())
    def test_a_vocabulary_split_over_devices_draws_the_same(self, draw: Draw, key: Key, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, 40))
        cut = data.draw(st.integers(0, size))
        ids, lanes = torch.tensor([[3], [9]]), torch.arange(size)
        halves = [draw(key, ids, torch.tensor(1), part) for part in (lanes[:cut], lanes[cut:])]
        assert torch.equal(torch.cat(halves, dim=1), draw(key, ids, torch.tensor(1), lanes))

    @given(key=strategies.keys(), ids=rows)
    def test_the_same_call_gives_the_same_bits(self, draw: Draw, key: Key, ids: torch.Tensor) -> None:
        first = draw(key, ids)
        draw(key.advance(), ids)
        assert torch.equal(first, draw(key, ids))

    @given(key=strategies.keys(), ids=rows)
    def test_narrow_integers_name_the_same_places(self, draw: Draw, key: Key, ids: torch.Tensor) -> None:
        small = ids % 100
        assert torch.equal(draw(key, small.to(torch.int32)), draw(key, small))


@given(strategies.keys(), st.integers(0, 50))
def test_a_permutation_is_one(key: Key, size: int) -> None:
    assert sorted(random.permutation(key, size).tolist()) == list(range(size))
