"""The bookkeeping of lanes in Triton: a program has some lanes, which do not see each other."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import on_device_of

LANES = 128
"""Lanes of a program."""


def record(
    book: Any, lanes: torch.Tensor, token: torch.Tensor, logp: torch.Tensor, kept: torch.Tensor | None, read: bool
) -> None:
    """Writes what was drawn in lanes that are alive, and sees which of them go on."""
    count = lanes.shape[0]
    if not count:
        return
    alive, stopped, stops = (x.view(torch.uint8) for x in (book.alive, book.stopped, book.stops))
    given, column = (token, book.tokens) if kept is None else (kept, book.kept)
    with on_device_of(lanes):
        _record_kernel[(triton.cdiv(count, LANES),)](
            lanes, token, logp, given, book.last, book.stored, book.drawn, book.limits, alive, stopped, book.state,
            book.tokens, book.logp, column, stops, count, book.tokens.shape[1] - 1,
            lanes.stride(0), token.stride(0), logp.stride(0), given.stride(0),
            KEPT=kept is not None, READ=read, LANES=LANES, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def next_places(stored: torch.Tensor, table: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and lengths."""
    places, lengths = (torch.empty(stored.shape, dtype=torch.int64, device=stored.device) for _ in range(2))
    if stored.shape[0]:
        with on_device_of(stored):
            _places_kernel[(triton.cdiv(stored.shape[0], LANES),)](
                stored, table, places, lengths, stored.shape[0], size, stored.stride(0), *table.stride(),
                LANES=LANES, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return places, lengths


@triton.jit
def _record_kernel(
    lanes_ptr, token_ptr, logp_ptr, given_ptr, last_ptr, stored_ptr, drawn_ptr, limits_ptr, alive_ptr, stopped_ptr, state_ptr,
    tokens_ptr, logps_ptr, kept_ptr, stops_ptr, count, columns, lanes_n, token_n, logp_n, given_n,
    KEPT: tl.constexpr, READ: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = i < count
    lane = tl.load(lanes_ptr + i * lanes_n, mask=inside, other=0)
    token = tl.load(token_ptr + i * token_n, mask=inside, other=0)
    alive = tl.load(alive_ptr + lane, mask=inside, other=0) != 0
    drawn = tl.load(drawn_ptr + lane, mask=inside, other=0)
    if READ:
        stored = tl.load(stored_ptr + lane, mask=inside, other=0)
        tl.store(stored_ptr + lane, stored + 1, mask=inside & alive)
    at = lane * (columns + 1) + tl.where(alive, drawn, columns)
    tl.store(tokens_ptr + at, token, mask=inside)
    tl.store(logps_ptr + at, tl.load(logp_ptr + i * logp_n, mask=inside, other=0.0), mask=inside)
    if KEPT:
        tl.store(kept_ptr + at, tl.load(given_ptr + i * given_n, mask=inside, other=0), mask=inside)
    tl.store(last_ptr + lane, token, mask=inside & alive)
    drawn += alive.to(tl.int64)
    ended = alive & (tl.load(stops_ptr + token, mask=inside, other=0) != 0)
    goes = alive & (ended == 0) & (drawn < tl.load(limits_ptr + lane, mask=inside, other=0))
    tl.store(drawn_ptr + lane, drawn, mask=inside)
    tl.store(alive_ptr + lane, goes.to(tl.uint8), mask=inside)
    tl.store(stopped_ptr + lane, tl.full([LANES], 1, dtype=tl.uint8), mask=inside & ended)
    tl.store(state_ptr + lane, tl.where(goes, drawn, -drawn), mask=inside)


@triton.jit
def _places_kernel(
    stored_ptr, table_ptr, places_ptr, lengths_ptr, count, size, stored_b, table_b, table_w, LANES: tl.constexpr
):  # fmt: skip
    i = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = i < count
    stored = tl.load(stored_ptr + i * stored_b, mask=inside, other=0)
    page = tl.load(table_ptr + i * table_b + (stored // size) * table_w, mask=inside, other=0)
    tl.store(places_ptr + i, page * size + stored % size, mask=inside)
    tl.store(lengths_ptr + i, stored + 1, mask=inside)
