"""The bookkeeping of lanes in plain torch."""

from __future__ import annotations

from typing import Any

import torch


def record(
    book: Any, lanes: torch.Tensor, token: torch.Tensor, logp: torch.Tensor, kept: torch.Tensor | None, read: bool
) -> None:
    """Writes what was drawn in lanes that are alive, and sees which of them go on."""
    alive, count = book.alive[lanes], book.drawn[lanes]
    if read:
        book.stored[lanes] += alive
    column = torch.where(alive, count, book.tokens.shape[1] - 1)
    book.tokens[lanes, column] = token
    book.logp[lanes, column] = logp
    if kept is not None:
        book.kept[lanes, column] = kept
    book.last[lanes] = torch.where(alive, token, book.last[lanes])
    count = count + alive
    ended = alive & book.stops[token]
    alive = alive & ~ended & (count < book.limits[lanes])
    book.drawn[lanes], book.alive[lanes] = count, alive
    book.stopped[lanes] = book.stopped[lanes] | ended
    book.state[lanes] = torch.where(alive, count, -count)


def next_places(stored: torch.Tensor, table: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and lengths."""
    page = table.gather(1, (stored // size)[:, None]).squeeze(1)
    return page * size + stored % size, stored + 1
