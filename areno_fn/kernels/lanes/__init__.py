"""`lanes`: what a token step keeps of sequences that are decoded together, in one launch each way."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

from areno_fn.kernels.backend import backend, require
from areno_fn.kernels.lanes import reference

__all__ = ["Book", "next_places", "record"]


class Book(NamedTuple):
    """Tensors of R lanes that are written in place. T columns, V vocabulary; all contiguous, numbers are int64.

    Attributes:
        last: [R], the token drawn last.
        stored: [R], tokens that the cache holds.
        drawn: [R], how many tokens have been drawn.
        limits: [R], the most to draw.
        alive: bool [R], still drawing.
        stopped: bool [R], the last token was one that ends a sequence.
        state: [R], `drawn`, negative in lanes that are not alive.
        tokens: [R, T + 1], what was drawn; column T takes what is drawn for a lane that is not alive.
        logp: float32 [R, T + 1].
        kept: [R, T + 1], or None.
        stops: bool [V], tokens that end a sequence.
    """

    last: torch.Tensor
    stored: torch.Tensor
    drawn: torch.Tensor
    limits: torch.Tensor
    alive: torch.Tensor
    stopped: torch.Tensor
    state: torch.Tensor
    tokens: torch.Tensor
    logp: torch.Tensor
    kept: torch.Tensor | None
    stops: torch.Tensor


def record(
    book: Book, lanes: torch.Tensor, token: torch.Tensor, logp: torch.Tensor, kept: torch.Tensor | None, *, read: bool
) -> None:
    """Writes down what was drawn in lanes that are alive, and which of them go on.

    Args:
        book: written to.
        lanes: int64 [n], distinct.
        token: int64 [n], drawn in each.
        logp: float32 [n].
        kept: int64 [n], where the book has it.
        read: whether the token before it was put into the cache for the draw.

    Raises:
        KernelError: shapes or dtypes do not fit each other, or there is no kernel for the device.
    """
    given = (token,) if kept is None else (token, kept)
    fits = lanes.ndim == 1 and all(x.shape == lanes.shape and x.dtype == torch.int64 for x in (lanes, *given))
    fits = fits and logp.shape == lanes.shape and logp.dtype == torch.float32 and (kept is None) == (book.kept is None)
    wanted = "lanes, tokens and, where the book has it, kept must be int64 [n], and logp float32 [n]"
    require(fits, "lanes", wanted, lanes, *given, logp)
    tensors = [x for x in book if x is not None]
    if backend("lanes", lanes, *given, logp, *tensors) == "reference":
        reference.record(book, lanes, token, logp, kept, read)
    else:
        importlib.import_module("areno_fn.kernels.lanes.triton").record(book, lanes, token, logp, kept, read)


def next_places(stored: torch.Tensor, table: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows put their next token: `table[b, stored // size] * size + stored % size`, and `stored + 1`.

    Args:
        stored: int64 [B], below W * size.
        table: int64 [B, W].
        size: tokens a page holds.

    Returns:
        Places and lengths, int64 [B].

    Raises:
        KernelError: shapes or dtypes do not fit each other, or there is no kernel for the device.
    """
    fits = table.ndim == 2 and stored.shape == table.shape[:1] and stored.dtype == table.dtype == torch.int64
    require(
        fits and size > 0, "lanes", "stored must be int64 [B], the table int64 [B, W] and size above 0", stored, table
    )
    if backend("lanes", stored, table) == "reference":
        return reference.next_places(stored, table, size)
    found: tuple[torch.Tensor, torch.Tensor]
    found = importlib.import_module("areno_fn.kernels.lanes.triton").next_places(stored, table, size)
    return found
