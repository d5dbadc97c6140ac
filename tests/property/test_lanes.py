"""The bookkeeping of lanes, one lane at a time in plain Python: the reference here, and Triton in its interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.lanes import Book, next_places, record

HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
ROWS, COLUMNS, VOCAB = 6, 4, 9


@pytest.fixture(autouse=True)
def few_lanes_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno_fn.kernels.lanes.triton.LANES", 4)


def some_book(source: torch.Generator, with_kept: bool) -> Book:
    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=source)

    limits = 1 + numbers(COLUMNS, ROWS)
    return Book(
        last=numbers(VOCAB, ROWS),
        stored=numbers(50, ROWS),
        drawn=torch.minimum(numbers(COLUMNS, ROWS), limits - 1),
        limits=limits,
        alive=numbers(2, ROWS).bool(),
        stopped=numbers(2, ROWS).bool(),
        state=numbers(9, ROWS),
        tokens=numbers(VOCAB, ROWS, COLUMNS + 1),
        logp=torch.rand(ROWS, COLUMNS + 1, generator=source),
        kept=numbers(VOCAB, ROWS, COLUMNS + 1) if with_kept else None,
        stops=numbers(2, VOCAB).bool(),
    )


def by_hand(book: Book, lanes: list[int], token: list[int], logp: list[float], kept: list[int], read: bool) -> Any:
    """The same, in lists."""
    state = {name: x.tolist() for name, x in book._asdict().items() if x is not None}
    for i, lane in enumerate(lanes):
        alive = state["alive"][lane]
        column = state["drawn"][lane] if alive else COLUMNS
        state["tokens"][lane][column], state["logp"][lane][column] = token[i], logp[i]
        if "kept" in state:
            state["kept"][lane][column] = kept[i]
        if alive:
            state["stored"][lane] += read
            state["last"][lane] = token[i]
            state["drawn"][lane] += 1
            ended = state["stops"][token[i]]
            state["stopped"][lane] = state["stopped"][lane] or ended
            state["alive"][lane] = not ended and state["drawn"][lane] < state["limits"][lane]
        drawn = state["drawn"][lane]
        state["state"][lane] = drawn if state["alive"][lane] else -drawn
    return state


def test_what_is_recorded_is_what_a_lane_alone_would_record(mode: str) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=HEALTH)
    @given(st.integers(0, 10_000), st.lists(st.integers(0, ROWS - 1), unique=True), st.booleans(), st.booleans())
    def holds(seed: int, lanes: list[int], with_kept: bool, read: bool) -> None:
        source = torch.Generator().manual_seed(seed)
        book = some_book(source, with_kept)
        token, kept = (torch.randint(0, VOCAB, (len(lanes),), generator=source) for _ in range(2))
        logp = torch.rand(len(lanes), generator=source)
        want = by_hand(book, lanes, token.tolist(), logp.tolist(), kept.tolist(), read)
        where = torch.tensor(lanes, dtype=torch.int64)
        record(book, where, token, logp, kept if with_kept else None, read=read)
        assert {name: x.tolist() for name, x in book._asdict().items() if x is not None} == want

    holds()


def test_the_next_place_is_in_the_page_that_the_table_names(mode: str) -> None:
    stored, table = torch.tensor([0, 7, 3, 5, 11]), torch.arange(100, 115).reshape(5, 3)
    places, lengths = next_places(stored, table, 4)
    assert places.tolist() == [400, 104 * 4 + 3, 106 * 4 + 3, 110 * 4 + 1, 114 * 4 + 3]
    assert lengths.tolist() == [1, 8, 4, 6, 12]


def test_what_does_not_fit_is_refused() -> None:
    book = some_book(torch.Generator(), with_kept=False)
    lanes, logp = torch.arange(2), torch.zeros(2)
    for given_lanes, given_logp, kept in (
        (lanes.int(), logp, None),
        (lanes, logp.double(), None),
        (lanes, logp, lanes),
    ):
        with pytest.raises(KernelError, match=r"lanes: lanes, tokens and"):
            record(book, given_lanes, lanes, given_logp, kept, read=True)
    with pytest.raises(KernelError, match=r"lanes: stored must be int64 \[B\]"):
        next_places(lanes, lanes, 4)
