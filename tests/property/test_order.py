"""Every row is read exactly once an epoch, wherever a run is cut and however often it is resumed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areno_fn.contracts.key import Key
from areno_fn.world.order import batch_rows, batches_per_epoch, next_position

SIZES = st.integers(1, 40)
ROWS = st.integers(1, 12)
SEEDS = st.integers(0, 2**32)


def run(
    seed: int, position: tuple[int, int], steps: int, size: int, rows: int
) -> tuple[list[list[int]], tuple[int, int]]:
    """`steps` batches from a saved position, with a key made afresh: a process that knows nothing else."""
    key = Key.of(seed)
    consumed = []
    for _ in range(steps):
        consumed.append(batch_rows(key, *position, size, rows))
        position = next_position(*position, size, rows)
    return consumed, position


@given(seed=SEEDS, size=SIZES, rows=ROWS, epochs=st.integers(1, 3))
def test_an_epoch_reads_every_row_once(seed: int, size: int, rows: int, epochs: int) -> None:
    count = batches_per_epoch(size, rows)
    batches, position = run(seed, (0, 0), epochs * count, size, rows)
    assert position == (epochs, 0)
    for epoch in range(epochs):
        part = batches[epoch * count : (epoch + 1) * count]
        assert sorted(row for batch in part for row in batch) == list(range(size))
        assert [len(batch) for batch in part[:-1]] == [rows] * (count - 1)


def test_D13_consumed_exactly_once_for_every_crash_point_and_after_two_resumes() -> None:
    total = 18  # 2 epochs of 9 batches, saved after each batch
    whole, end = run(5, (0, 0), total, 9, 1)
    for first in range(total + 1):
        for second in range(first, total + 1):
            a, position = run(5, (0, 0), first, 9, 1)
            b, position = run(5, position, second - first, 9, 1)
            c, position = run(5, position, total - second, 9, 1)
            assert a + b + c == whole
            assert position == end == (2, 0)


@given(seed=SEEDS, size=SIZES, rows=ROWS, cuts=st.lists(st.integers(0, 7), max_size=4))
def test_D13_cutting_a_run_anywhere_changes_nothing(seed: int, size: int, rows: int, cuts: list[int]) -> None:
    position: tuple[int, int] = (0, 0)
    pieces: list[list[int]] = []
    for steps in cuts:
        consumed, position = run(seed, position, steps, size, rows)
        pieces += consumed
    assert (pieces, position) == run(seed, (0, 0), sum(cuts), size, rows)
