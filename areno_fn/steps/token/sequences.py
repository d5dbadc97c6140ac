"""What a running batch knows of its sequences: the prompt that each continues, where it is, and what it owns."""

from __future__ import annotations

from enum import Enum

import attrs
import torch

from areno_fn.steps.token.lanes import Columns


class Status(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@attrs.define(eq=False)
class Prompt:
    """A text that one or more sequences continue.

    Attributes:
        tokens: at least one.
        unread: sequences that have not been admitted yet.
        pages: those of the text, while it is kept for them.
        logits: [V], after the text, likewise.
    """

    tokens: list[int]
    unread: int = 0
    pages: list[int] = attrs.Factory(list)
    logits: torch.Tensor | None = None


@attrs.define(eq=False)
class Sample:
    """One sample of a prompt.

    Attributes:
        name: what its draws are keyed by.
        prompt: what it continues.
        limit: most tokens to draw.
        order: its place among all that came.
        status: where it is.
        slot: its lane.
        pages: what it owns; one that waits owns pages while its text is half read.
        stored: tokens its pages hold, once the steps that were started have ended.
        drawn: tokens it has drawn by then, if none of them ends it.
        earlier: what it had drawn when it gave back its pages.
        text: the prompt and those tokens.
    """

    name: int
    prompt: Prompt
    limit: int
    order: int = -1
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[int] = attrs.Factory(list)
    stored: int = 0
    drawn: int = 0
    earlier: Columns | None = None
    text: list[int] = attrs.Factory(list)


@attrs.frozen
class Finished:
    """Sequences that have come to their end.

    Attributes:
        sequences: n of them.
        columns: what they have drawn, n rows.
    """

    sequences: list[Sample]
    columns: Columns
