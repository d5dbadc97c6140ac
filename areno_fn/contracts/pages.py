"""A cache of keys and values in pages, and what a model answers that can read and write one.

A page holds a fixed number of consecutive tokens of one sequence, in every layer. A table says which pages a row has,
in the order of its tokens; page 0 belongs to nobody: what is written for a row that is not there goes to it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import record, shown


@record
class Pages:
    """Storage of a cache. It is allocated once and written in place; who owns which page is kept elsewhere.

    Attributes:
        keys: per layer, [P, page size, kv_heads, head_dim], finite everywhere.
        values: per layer, the same shape.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def __check__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise RecordError(
                f"Pages needs keys and values of at least one layer, received {len(self.keys)} and {len(self.values)}"
            )
        for leaf in (*self.keys, *self.values):
            if leaf.ndim != 4 or leaf.shape[:2] != self.keys[0].shape[:2]:
                raise RecordError(
                    f"Pages must be [P, page size, kv_heads, head_dim] in every layer, received {shown(leaf)}"
                )

    @property
    def count(self) -> int:
        """P."""
        return self.keys[0].shape[0]

    @property
    def size(self) -> int:
        """Tokens a page holds."""
        return self.keys[0].shape[1]


@runtime_checkable
class PagedPolicy(TokenPolicy, Protocol):
    """A language model that reads from and writes to pages. B rows, L prompt length, W pages a row, V vocabulary."""

    def pages(self, params: Any, count: int, size: int) -> Pages:
        """`count` pages of `size` tokens, zero, on the device and in the dtype of the parameters."""
        ...

    def read_into(
        self,
        params: Any,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        pages: Pages,
        stored: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reads right-padded texts [B, L], from their beginning or from where they were left, and writes them to their pages.

        Args:
            lengths: int64 [B], from 1 to L.
            table: int64 [B, W], with a page for every token, those of earlier parts included; no wider than needed is best.
            pages: written to; read where texts go on.
            stored: int64 [B], tokens of each text that its pages hold from earlier parts; none where it is omitted.

        Returns:
            The logits [B, V] after the last token of each.
        """
        ...

    def read_next(
        self,
        params: Any,
        tokens: torch.Tensor,
        stored: torch.Tensor,
        table: torch.Tensor,
        pages: Pages,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Reads one more token a row [B].

        Args:
            stored: int64 [B], tokens of each row that its pages hold.
            table: int64 [B, W], with a page for the token that is read; page 0 in rows that are not there.
            pages: written to.
            longest: the largest of `stored` or more, where it is known; all of the table is looked at otherwise.

        Returns:
            The logits [B, V] after it.
        """
        ...

    def page_bytes(self, params: Any, size: int) -> int:
        """Bytes of one page of `size` tokens."""
        ...
