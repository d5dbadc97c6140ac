"""`Lanes`: the buffers of sequences that are decoded together. R lanes, T columns, W pages a lane, V vocabulary.

Shapes never change, so that the work on the first b lanes can be captured once and replayed. A lane that is not alive
keeps what it has: what is computed for it goes to column T, and to page 0 once its row of the table is cleared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from areno_fn import tree
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy, Pages
from areno_fn.contracts.policy import is_bitwise
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels.lanes import Book, record
from areno_fn.steps.token.sampling import cuts, draw


class Columns(NamedTuple):
    """What lanes have drawn: n rows of T columns, past their lengths 0, 0.0 and 1.

    Attributes:
        tokens: int64 [n, T].
        logp: float32 [n, T].
        kept: int64 [n, T], or None where nothing is ever cut off.
        lengths: int64 [n].
        stopped: bool [n], the last token is one that ends a sequence.
    """

    tokens: torch.Tensor
    logp: torch.Tensor
    kept: torch.Tensor | None
    lengths: torch.Tensor
    stopped: torch.Tensor


class Lanes:
    """Buffers on one device; everything is written in place, in the order of the calls.

    Args:
        policy: the model.
        stop: tokens that end a sequence.
        sampling: the distribution; T is its `max_tokens`.
        rows: R.
        width: W.
        device: where they lie.
    """

    def __init__(
        self,
        policy: PagedPolicy,
        stop: Collection[int],
        sampling: Sampling,
        rows: int,
        width: int,
        device: torch.device,
    ) -> None:
        self.policy, self.sampling, self.device = policy, sampling, device
        self._rescored = is_bitwise(policy)
        self.rows, self.width, self.columns = rows, width, sampling.max_tokens

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._every = torch.arange(rows, device=device)
        self._stops = numbers(policy.vocab_size).bool()
        self._stops[list(stop)] = True
        self._key = Key(seed=numbers(), counter=numbers())
        self._tokens, self._stored, self._names, self._drawn, self._limits = (numbers(rows) for _ in range(5))
        self._alive, self._stopped = numbers(rows).bool(), numbers(rows).bool()
        self._table = numbers(rows, width)
        self._out_tokens = numbers(rows, self.columns + 1)
        self._out_logp = self._out_tokens.float()
        self._out_kept = self._out_tokens + 1 if cuts(sampling, policy.vocab_size) else None
        self.state = numbers(rows)
        """Tokens drawn, int64 [R]; negative in lanes that are not alive."""
        self._book = Book(
            last=self._tokens,
            stored=self._stored,
            drawn=self._drawn,
            limits=self._limits,
            alive=self._alive,
            stopped=self._stopped,
            state=self.state,
            tokens=self._out_tokens,
            logp=self._out_logp,
            kept=self._out_kept,
            stops=self._stops,
        )

    def use(self, key: Key) -> None:
        """Draws with another key from now on."""
        tree.map(lambda mine, given: mine.copy_(given), self._key, key)

    def start(
        self,
        slots: Sequence[int],
        names: Sequence[int],
        stored: Sequence[int],
        limits: Sequence[int],
        tables: Sequence[Sequence[int]],
        before: Sequence[Columns | None],
        logits: torch.Tensor,
    ) -> None:
        """Sequences whose texts have been read begin in empty lanes, and draw their next token.

        Args:
            slots: the lanes.
            names: what their draws are keyed by.
            stored: lengths of the texts.
            limits: most tokens to draw, at most T.
            tables: the pages of each.
            before: what was drawn earlier (one row), for a sequence that goes on.
            logits: [n, V], after the texts.
        """
        lanes = self._numbers(slots)
        self._names[lanes], self._stored[lanes] = self._numbers(names), self._numbers(stored)
        self._limits[lanes] = self._numbers(limits)
        self._table[lanes] = self._numbers([[*pages, *[0] * (self.width - len(pages))] for pages in tables])
        for buffer in (self._drawn, self._stopped, self._out_tokens, self._out_logp):
            buffer.index_fill_(0, lanes, 0)
        self._alive.index_fill_(0, lanes, 1)
        if self._out_kept is not None:
            self._out_kept.index_fill_(0, lanes, 1)
        for slot, columns in zip(slots, before, strict=True):
            if columns is not None:
                self._restore(slot, columns)
        drawn = draw(logits, self.sampling, self._key, self._names[lanes], self._stored[lanes], rescored=self._rescored)
        record(self._book, lanes, *drawn, read=False)

    def step(self, params: Any, pages: Pages, rows: int, longest: int | None = None) -> None:
        """The first `rows` lanes read the token they have drawn last, and draw the next.

        Args:
            params: the model's parameters.
            pages: written to.
            rows: at most R.
            longest: the most tokens that one of them has stored, where it is known.
        """
        stored, names = self._stored[:rows], self._names[:rows]
        logits = self.policy.read_next(params, self._tokens[:rows], stored, self._table[:rows], pages, longest)
        drawn = draw(logits, self.sampling, self._key, names, stored + 1, rescored=self._rescored)
        record(self._book, self._every[:rows], *drawn, read=True)

    def taken(self, slots: Sequence[int], indices: Sequence[int], pages: Sequence[int]) -> None:
        """Writes single entries of the table."""
        self._table[self._numbers(slots), self._numbers(indices)] = self._numbers(pages)

    def clear(self, slots: Sequence[int]) -> None:
        """Empties lanes, so that nothing is written to what were their pages."""
        lanes = self._numbers(slots)
        # a number that is assigned would be copied to a GPU, and waited for
        for buffer in (self._alive, self._stored, self._tokens, self._table):
            buffer.index_fill_(0, lanes, 0)

    def gather(self, slots: Sequence[int]) -> Columns:
        """What has been drawn in some lanes, in memory of its own."""
        lanes, last = self._numbers(slots), self.columns
        kept = None if self._out_kept is None else self._out_kept[lanes, :last]
        tokens, logp = self._out_tokens[lanes, :last], self._out_logp[lanes, :last]
        return Columns(tokens, logp, kept, self._drawn[lanes], self._stopped[lanes])

    def move(self, slots: Sequence[int]) -> None:
        """Lane i takes over what lane `slots[i]` has; all lanes behind are emptied."""
        lanes = self._numbers(slots)
        for buffer in self._per_lane():
            buffer[: len(slots)] = buffer[lanes]
        self.clear(range(len(slots), self.rows))

    def _per_lane(self) -> list[torch.Tensor]:
        numbers = [self._tokens, self._stored, self._names, self._drawn, self._limits, self.state]
        outputs = [self._out_tokens, self._out_logp, *([] if self._out_kept is None else [self._out_kept])]
        return [*numbers, self._alive, self._stopped, self._table, *outputs]

    def _restore(self, slot: int, before: Columns) -> None:
        last = self.columns
        self._out_tokens[slot, :last], self._out_logp[slot, :last] = before.tokens[0], before.logp[0]
        if self._out_kept is not None and before.kept is not None:
            self._out_kept[slot, :last] = before.kept[0]
        self._drawn[slot] = before.lengths[0]

    def _numbers(self, values: Any) -> torch.Tensor:
        return on_device(values, self.device)


def on_device(values: Any, device: torch.device) -> torch.Tensor:
    """Integers as an int64 tensor, sent to a GPU without waiting for it."""
    numbers = torch.tensor(list(values), dtype=torch.int64)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
