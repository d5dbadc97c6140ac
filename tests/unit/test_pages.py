"""Owners of pages, counted by hand and against a plain model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.pages import Pages
from areno_fn.steps.token.pages import Copy, Ledger


def test_pages_are_taken_shared_and_given_back() -> None:
    ledger = Ledger(5, 4)
    assert ledger.free == 4
    assert [ledger.needed(n) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    mine = ledger.take(2)
    assert sorted(mine) == [1, 2] and ledger.free == 2
    other = ledger.share(mine)
    ledger.give_back(mine)
    assert ledger.free == 2
    ledger.give_back(other)
    assert ledger.free == 4


def test_a_shared_page_is_copied_for_the_row_that_writes_and_the_last_owner_keeps_it() -> None:
    ledger = Ledger(6, 4)
    first = ledger.take(2)
    second = ledger.share(first)
    assert ledger.lacks(first, 5) and ledger.lacks(second, 5)
    before = list(second)
    copy = ledger.owned(first, 5)
    assert copy == Copy(source=before[1], target=first[1])
    assert first[0] == second[0] and first[1] != second[1] and second == before
    assert not ledger.lacks(first, 5) and not ledger.lacks(second, 5)
    assert ledger.lacks(second, 8)
    assert ledger.owned(second, 8) is None and len(second) == 3
    ledger.give_back(first)
    ledger.give_back(second)
    assert ledger.free == 5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_no_page_is_lost_or_owned_by_two_that_do_not_share(moves: list[tuple[int, int]]) -> None:
    ledger, rows = Ledger(8, 2), [[] for _ in range(6)]
    for move, row in moves:
        if move == 0 and ledger.free:
            rows[row] += ledger.take(1)
        elif move == 1 and not rows[row]:
            rows[row] = ledger.share(rows[(row + 1) % 6])
        elif move == 2:
            ledger.give_back(rows[row])
            rows[row] = []
        elif rows[row] and ledger.free and ledger.lacks(rows[row], 2 * len(rows[row]) - 1):
            ledger.owned(rows[row], 2 * len(rows[row]) - 1)
        held = {page for pages in rows for page in pages}
        assert 0 not in held and ledger.free == 7 - len(held)


@pytest.mark.parametrize(("count", "size"), [(1, 4), (0, 4), (5, 0)])
def test_a_cache_without_pages_is_refused(count: int, size: int) -> None:
    with pytest.raises(SpecError, match=f"at least 2 pages of at least 1 token, received {count} of {size}"):
        Ledger(count, size)


def test_pages_of_unequal_layers_are_refused() -> None:
    wide, narrow = torch.zeros(3, 4, 1, 2), torch.zeros(2, 4, 1, 2)
    with pytest.raises(RecordError, match=r"Pages must be \[P, page size, kv_heads, head_dim\] in every layer"):
        Pages(keys=(wide, narrow), values=(wide, wide))
    with pytest.raises(RecordError, match="received 0 and 0"):
        Pages(keys=(), values=())
    assert (Pages(keys=(wide,), values=(wide,)).count, Pages(keys=(wide,), values=(wide,)).size) == (3, 4)
