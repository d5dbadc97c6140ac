"""Who owns the pages of a cache: plain counting on the host, without a tensor.

A page has as many owners as rows hold it. Samples of one prompt hold its pages together; a row that writes needs a page
of its own, so that a page with several owners is copied first (`Ledger.owned`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from areno_fn.contracts.errors import SpecError


class Copy(NamedTuple):
    """A page whose content must be copied before anything else is written."""

    source: int
    target: int


class Ledger:
    """Owners of pages 1 to `count` - 1; page 0 is nobody's.

    Raises:
        SpecError: there is no page to own.
    """

    def __init__(self, count: int, size: int) -> None:
        if count < 2 or size < 1:
            raise SpecError(f"a cache needs at least 2 pages of at least 1 token, received {count} of {size}")
        self.count, self.size = count, size
        self._owners = [0] * count
        self._free = list(range(count - 1, 0, -1))

    @property
    def free(self) -> int:
        """How many pages have no owner."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Pages that had no owner, each with one now; the caller has seen that there are enough."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """The same pages, for one more owner."""
        shared = list(pages)
        for page in shared:
            assert self._owners[page] > 0, f"page {page} has no owner"
            self._owners[page] += 1
        return shared

    def give_back(self, pages: Iterable[int]) -> None:
        """One owner less for every page; those that nobody is left to own can be taken again."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def lacks(self, pages: list[int], place: int) -> bool:
        """Whether a page must be taken before a token may be written at `place` of a row that owns `pages`."""
        index = place // self.size
        return index == len(pages) or self._owners[pages[index]] > 1

    def owned(self, pages: list[int], place: int) -> Copy | None:
        """Sees to it that the row alone owns the page of `place`, which `lacks` one: `pages` is changed.

        Returns:
            What must be copied, if the page was shared.
        """
        index = place // self.size
        (page,) = self.take(1)
        if index == len(pages):
            pages.append(page)
            return None
        old, pages[index] = pages[index], page
        self.give_back((old,))
        return Copy(source=old, target=page)
