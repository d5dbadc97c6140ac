"""In which order rows are read, as pure functions of a key and a position that names the *next* batch.

An epoch reads every row exactly once. Where the rows do not fill the last batch, that batch is smaller: losses are
normalised by what they sum over, so it is an exact batch of fewer rows, and no row is repeated, dropped or carried
into the next epoch.

A weighted `Mixture` of data sets is another epoch: it has as many places as there are rows, every data set fills a
fixed number of them, and each is read in rounds of its own, every row once before any is read again, which go on from
one epoch to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from areno_fn import random
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.key import Key

Mixture = tuple[tuple[int, int], ...]
"""For every data set, its number of rows and the places it fills in an epoch; the rows stand one set after the other."""


def mixture(sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
    """Shares the places of an epoch, as many as there are rows, out by weight; fractions go to the largest remainders.

    Args:
        sizes: rows of every data set.
        weights: above 0, of any sum.

    Raises:
        DataError: a data set has no rows, or would fill no place.
    """
    for index, size in enumerate(sizes):
        if not size:
            raise DataError(f"data set {index}: none of its rows is left to be read; leave the data set out")
    places, whole = sum(sizes), sum(weights)
    exact = [places * (weight / whole) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: places - sum(counts)]:
        counts[index] += 1
    for index, count in enumerate(counts):
        if not count:
            raise DataError(
                f"data set {index}: its weight of {weights[index]:g} among {whole:g} gives it none of the {places} places "
                f"of an epoch; raise it, or leave the data set out"
            )
    return tuple(zip(sizes, counts, strict=True))


def epoch_order(key: Key, epoch: int, size: int, mixed: Mixture = ()) -> tuple[int, ...]:
    """The rows of one epoch in the order they are read: a permutation of `range(size)` unless they are mixed.

    Args:
        key: names the run and the phase.
        epoch: counted from 0; each has its own order.
        size: number of rows.
        mixed: how often rows are read that are mixed by weight.
    """
    return _order(int(key.seed), int(key.counter), epoch, size, mixed)


def batches_per_epoch(size: int, rows: int) -> int:
    """Batches of `rows` rows in one epoch, the smaller last one included.

    Raises:
        DataError: the data set or the batch is empty.
    """
    if size < 1 or rows < 1:
        raise DataError(f"an epoch needs at least 1 row and 1 row a batch, received {size} rows and {rows} a batch")
    return -(-size // rows)


def batch_rows(key: Key, epoch: int, batch: int, size: int, rows: int, mixed: Mixture = ()) -> list[int]:
    """The rows of batch `batch` of epoch `epoch`.

    Raises:
        DataError: the epoch has no such batch, as when a position belongs to other data.
    """
    _require_batch(batch, size, rows)
    return list(epoch_order(key, epoch, size, mixed)[batch * rows : (batch + 1) * rows])


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
def _order(seed: int, counter: int, epoch: int, size: int, mixed: Mixture) -> tuple[int, ...]:
    """Kept for the batches of one epoch: the whole permutation is needed for each."""
    key = Key(seed=torch.tensor(seed), counter=torch.tensor(counter))
    places = random.permutation(key.fold("epoch").fold(epoch), size).tolist()
    if not mixed:
        return tuple(places)
    rows, start = [], 0
    for index, (own, count) in enumerate(mixed):
        rows += [start + row for row in _window(key.fold("mixture").fold(index), own, epoch * count, count)]
        start += own
    return tuple(rows[place] for place in places)


def _window(key: Key, size: int, first: int, count: int) -> list[int]:
    """Rows `first` to `first + count` of the endless sequence of one data set: a permutation for every round."""
    before = first // size
    rounds = range(before, (first + count - 1) // size + 1)
    rows = [row for number in rounds for row in random.permutation(key.fold(number), size).tolist()]
    return rows[first - before * size :][:count]
