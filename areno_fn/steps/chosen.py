"""Rows that are chosen by their number, as updates choose those of a rollout."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import shown


def require_rows(rows: torch.Tensor, count: int, whose: str) -> None:
    """Refuses what is no choice of rows; numbers below 0 count from the end.

    Numbers on a GPU are waited for, so that choices made by the host are best left there.

    Args:
        rows: int64 [M].
        count: how many there are.
        whose: for the message, for example "the trajectory".

    Raises:
        RecordError: it is no vector of int64, or a row does not exist.
    """
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise RecordError(f"rows are named by a vector of int64, received {shown(rows)}")
    outside = [row for row in rows.tolist() if not -count <= row < count]
    if outside:
        raise RecordError(f"rows names row {outside[0]}, but {whose} has {count} rows, numbered from 0")
