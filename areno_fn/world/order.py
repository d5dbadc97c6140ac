"""In which order rows are read, as pure functions of a key and a position that names the *next* batch.

An epoch reads every row exactly once. Where the rows do not fill the last batch, that batch is smaller: losses
are normalised by what they sum over, so it is an exact batch of fewer rows, and no row is repeated, dropped or
carried into the next epoch.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from areno_fn import random
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.key import Key


def epoch_order(key: Key, epoch: int, size: int) -> tuple[int, ...]:
    """The rows of one epoch in the order they are read: a permutation of `range(size)`.

    Args:
        key: names the run and the phase.
        epoch: counted from 0; each has its own order.
        size: number of rows.
    """
    return _order(int(key.seed), int(key.counter), epoch, size)


def batches_per_epoch(size: int, rows: int) -> int:
    """Batches of `rows` rows in one epoch, the smaller last one included.

    Raises:
        DataError: the data set or the batch is empty.
    """
    if size < 1 or rows < 1:
        raise DataError(f"an epoch needs at least 1 row and 1 row a batch, received {size} rows and {rows} a batch")
    return -(-size // rows)


def batch_rows(key: Key, epoch: int, batch: int, size: int, rows: int) -> list[int]:
    """The rows of batch `batch` of epoch `epoch`.

    Raises:
        DataError: the epoch has no such batch, as when a position belongs to other data.
    """
    _require_batch(batch, size, rows)
    return list(epoch_order(key, epoch, size)[batch * rows : (batch + 1) * rows])


def next_position(epoch: int, batch: int, size: int, rows: int) -> tuple[int, int]:
    """The (epoch, batch) after a batch has been consumed; after the last batch of epoch e it is (e + 1, 0).

    Raises:
        DataError: the epoch has no such batch.
    """
    _require_batch(batch, size, rows)
    return (epoch, batch + 1) if batch + 1 < batches_per_epoch(size, rows) else (epoch + 1, 0)


def _require_batch(batch: int, size: int, rows: int) -> None:
    count = batches_per_epoch(size, rows)
    if not 0 <= batch < count:
        raise DataError(
            f"batch {batch} does not exist: {size} rows in batches of {rows} make {count} batches, counted from 0"
        )


@lru_cache(maxsize=4)
def _order(seed: int, counter: int, epoch: int, size: int) -> tuple[int, ...]:
    """Kept for the batches of one epoch: the whole permutation is needed for each."""
    key = Key(seed=torch.tensor(seed), counter=torch.tensor(counter))
    return tuple(random.permutation(key.fold("epoch").fold(epoch), size).tolist())
