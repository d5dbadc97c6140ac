from __future__ import annotations

import pytest

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.key import Key
from areno_fn.world.order import batch_rows, batches_per_epoch, epoch_order, next_position

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
