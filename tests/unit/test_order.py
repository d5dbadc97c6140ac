from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.key import Key
from areno_fn.world.order import batch_rows, batches_per_epoch, epoch_order, mixture, next_position

KEY = Key.of(7).fold("order").fold(0)


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    orders = [epoch_order(KEY, epoch, 50) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 3
    assert epoch_order(Key.of(7).fold("order").fold(1), 0, 50) != orders[0]
    assert epoch_order(KEY, 0, 50) == orders[0]


def test_an_advanced_key_is_another_order() -> None:
    assert epoch_order(KEY.advance(), 0, 50) != epoch_order(KEY, 0, 50)


@pytest.mark.parametrize(("size", "rows", "count"), [(9, 1, 9), (10, 3, 4), (9, 3, 3), (2, 16, 1), (1, 1, 1)])
def test_batches_per_epoch(size: int, rows: int, count: int) -> None:
    assert batches_per_epoch(size, rows) == count


def test_the_last_batch_is_smaller_and_nothing_is_lost() -> None:
    batches = [batch_rows(KEY, 0, batch, 10, 3) for batch in range(4)]
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(row for batch in batches for row in batch) == list(range(10))


def test_D13_the_position_names_the_next_batch() -> None:
    positions = [(0, 0)]
    for _ in range(18):
        positions.append(next_position(*positions[-1], size=9, rows=1))
    assert positions[:10] == [*((0, batch) for batch in range(9)), (1, 0)]
    assert positions[9:] == [*((1, batch) for batch in range(9)), (2, 0)]


def test_a_batch_that_is_not_there() -> None:
    with pytest.raises(DataError, match="batch 4 does not exist: 10 rows in batches of 3 make 4 batches"):
        batch_rows(KEY, 0, 4, 10, 3)
    with pytest.raises(DataError, match="batch 9 does not exist"):
        next_position(0, 9, 9, 1)


@pytest.mark.parametrize(("size", "rows"), [(0, 4), (4, 0)])
def test_empty_epochs(size: int, rows: int) -> None:
    with pytest.raises(DataError, match="at least 1 row"):
        batches_per_epoch(size, rows)


def counts(rows: Iterable[int], size: int) -> list[int]:
    seen = Counter(rows)
    return [seen[row] for row in range(size)]


@pytest.mark.parametrize(
    ("sizes", "weights", "places"),
    [
        ([6, 2], [1.0, 1.0], [4, 4]),
        ([6, 2], [3.0, 1.0], [6, 2]),  # weights that are the sizes read every row once
        ([5, 5], [0.7, 0.3], [7, 3]),
        ([3, 3, 4], [1.0, 1.0, 1.0], [4, 3, 3]),  # 3 1/3 each; the first of equal remainders gets the place
        ([1, 9], [9.0, 1.0], [9, 1]),
        ([4], [0.2], [4]),
    ],
)
def test_places_are_shared_by_weight(sizes: list[int], weights: list[float], places: list[int]) -> None:
    assert mixture(sizes, weights) == tuple(zip(sizes, places, strict=True))


def test_a_weight_that_gives_no_place_is_refused() -> None:
    with pytest.raises(DataError, match=r"data set 1: its weight of 0.01 among 1.01 gives it none of the 10 places"):
        mixture([5, 5], [1.0, 0.01])


def test_a_mixed_epoch_has_the_places_of_every_data_set() -> None:
    mixed = mixture([6, 2], [1.0, 1.0])
    for epoch in range(5):
        order = epoch_order(KEY, epoch, 8, mixed)
        assert len(order) == 8
        assert sum(row < 6 for row in order) == 4
        assert counts(order, 8)[6:] == [2, 2]  # 4 places for 2 rows: two whole rounds
    assert len({epoch_order(KEY, epoch, 8, mixed) for epoch in range(5)}) == 5
    assert epoch_order(KEY, 3, 8, mixed) == epoch_order(Key.of(7).fold("order").fold(0), 3, 8, mixed)


def test_rounds_go_on_from_one_epoch_to_the_next() -> None:
    mixed = mixture([6, 2], [1.0, 1.0])
    read: list[int] = []
    for epoch in range(3):
        read += epoch_order(KEY, epoch, 8, mixed)
        seen = counts(read, 8)[:6]
        assert max(seen) - min(seen) <= 1, "no row is read twice more than another of its data set"
    assert counts(read, 8)[:6] == [2] * 6


def test_batches_of_a_mixture_are_its_epoch_cut_up() -> None:
    mixed = mixture([6, 2], [1.0, 3.0])
    batches = [batch_rows(KEY, 2, batch, 8, 3, mixed) for batch in range(3)]
    assert [len(batch) for batch in batches] == [3, 3, 2]
    assert [row for batch in batches for row in batch] == list(epoch_order(KEY, 2, 8, mixed))


def test_without_a_mixture_nothing_changes() -> None:
    assert epoch_order(KEY, 1, 50, ()) == epoch_order(KEY, 1, 50)


@pytest.mark.parametrize("cuts", [[], [0], [1, 1], [4, 2], [3, 3, 3]])
def test_D13_a_mixture_is_consumed_exactly_once_wherever_it_is_cut(cuts: list[int]) -> None:
    mixed = mixture([6, 2], [1.0, 1.0])
    position, read = (0, 0), []
    for steps in [*cuts, 100]:
        # a new process knows the position alone
        for _ in range(steps):
            if position == (3, 0):
                break
            read += batch_rows(KEY, *position, 8, 3, mixed)
            position = next_position(*position, size=8, rows=3)
    assert read == [row for epoch in range(3) for row in epoch_order(KEY, epoch, 8, mixed)]
