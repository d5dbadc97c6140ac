"""Continuous batching: sequences enter a running batch as others leave it, and take pages of the cache as they grow.

Whatever the batch, a sequence gets what it would get alone: its draws are keyed by its name and its places, and rows do
not see each other. So the rules below decide about time and memory only:

* Sequences are admitted in the order they came, as long as a lane is free and there are pages for the text and one to
  spare for every lane in use.
* A step reads no more tokens of texts than its budget. A longer text is read in parts, one a step, while those in the
  lanes go on; whoever comes after it waits, and what was read of it is kept in its pages, unless an older sequence needs them.
* A prompt is read once for all its samples. They own its pages together, and copy the last one when they write to it. The
  prompt stays read until its last sample is admitted, or until its pages are needed.
* When no page is left for a sequence that grows, prompts kept for samples to come are forgotten first, and texts that
  are half read after them; then the sequences that came last give back theirs and wait. What these have drawn is kept,
  and read again with the prompt.
* The oldest sequence never waits for a younger one, and the cache holds at least one of any length: all come to their end.

The host looks at the result of a step while the next one runs: one synchronisation a step, and no waiting in between.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.graphs import Steps, buckets
from areno_fn.steps.token.lanes import Lanes, on_device
from areno_fn.steps.token.pages import Copy, Ledger
from areno_fn.steps.token.reading import Part, Reading
from areno_fn.steps.token.sequences import Finished, Prompt, Sample, Status

READ_TOKENS = 1 << 15
"""Most tokens of texts, padding included, that are read in a step, where nothing else is said."""


class _Pending(NamedTuple):
    """A step whose result the host has not seen: who was in which lane, and the lanes' states once it is there."""

    sequences: list[Sample | None]
    state: torch.Tensor
    ready: torch.cuda.Event | None


class Batch:
    """Sequences that are continued together.

    Args:
        policy: the model.
        stop: tokens that end a sequence.
        sampling: the distribution; `max_tokens` is the most that a sequence may ask for.
        params: the parameters, of which dtype and device are taken; `load` says what to draw with.
        rows: lanes.
        pages: pages of the cache, of which one is nobody's.
        page_size: tokens a page holds.
        longest: most tokens of a prompt and its continuation.
        capture: whether token steps are captured on a GPU.
        read_tokens: most tokens of texts, padding included, that a step reads; a longer text is read in parts.

    Raises:
        SpecError: there are not enough pages for one sequence of `longest` tokens, no lane, or no token to read.
    """

    def __init__(
        self,
        policy: PagedPolicy,
        stop: Collection[int],
        sampling: Sampling,
        params: Any,
        *,
        rows: int,
        pages: int,
        page_size: int,
        longest: int,
        device: torch.device,
        capture: bool = True,
        read_tokens: int = READ_TOKENS,
    ) -> None:
        if read_tokens < 1:
            raise SpecError(f"a batch needs read_tokens of at least 1, received {read_tokens}")
        self._ledger = Ledger(pages, page_size)
        width = self._ledger.needed(longest)
        if rows < 1 or width > self._ledger.free:
            raise SpecError(
                f"a batch needs at least one lane and {width + 1} pages, which hold one sequence of {longest} tokens, "
                f"received {rows} and {pages} of {page_size} tokens"
            )
        self.rows, self.longest, self._read_tokens = rows, longest, read_tokens
        self._policy = policy
        self._sampling = sampling
        self._lanes = Lanes(policy, stop, sampling, rows, width, device)
        self._steps = Steps(self._lanes, policy.pages(params, pages, page_size), capture=capture)
        self._slots: list[Sample | None] = [None] * rows
        self._buckets = buckets(rows)
        self._waiting: list[tuple[int, Sample]] = []
        self._kept: list[Prompt] = []
        self._pending: deque[_Pending] = deque()
        self._finished: list[Finished] = []
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._waiting and not self._running() and not self._finished

    @property
    def free_pages(self) -> int:
        """Pages without an owner."""
        return self._ledger.free

    def load(self, params: Any, key: Key) -> None:
        """Goes on with these parameters and this key. Nothing that was read with others is used again."""
        self._settle(keep=0)
        self._retire()
        for sequence in self._running():
            self._set_back(sequence)
        self._forget(self._ledger.count)
        for sequence in self._half_read():
            self._give_up(sequence)
        self._steps.load(params)
        self._lanes.use(key)

    def add(self, sequence: Sample) -> None:
        """A sequence comes last in the queue.

        Raises:
            SpecError: it may become longer than a sequence of this batch.
        """
        most = len(sequence.prompt.tokens) + sequence.limit
        if not 1 <= sequence.limit <= self._lanes.columns or most > self.longest:
            raise SpecError(
                f"a sequence of this batch draws 1 to {self._lanes.columns} tokens and has at most {self.longest} with its "
                f"prompt, received one that draws {sequence.limit} after {len(sequence.prompt.tokens)}"
            )
        sequence.order, sequence.text = self._arrivals, sequence.prompt.tokens
        self._arrivals += 1
        sequence.prompt.unread += 1
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def cancel(self, sequence: Sample) -> None:
        """A sequence leaves without a result, and its pages are free at once; one that has ended stays as it is."""
        if sequence.status is Status.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
            self._give_up(sequence)
            if sequence.earlier is None:
                self._admitted(sequence)
        elif sequence.status is Status.RUNNING:
            self._leave(sequence)
        else:
            return
        sequence.status = Status.CANCELLED

    def advance(self) -> list[Finished]:
        """One token for every sequence that runs, and what has ended so far."""
        self._admit()
        self._grow()
        if self._running():
            self._launch()
        self._settle(keep=1 if self._running() else 0)
        self._retire()
        self._close_up()
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------------------------ who runs

    def _running(self) -> list[Sample]:
        return [sequence for sequence in self._slots if sequence is not None]

    def _admit(self) -> None:
        """The sequences that came first begin, in the lanes that are free."""
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None][::-1]
        begun: list[Sample] = []
        reading = Reading(self._read_tokens)
        sources: list[int | Prompt] = []  # where the logits of each one that begins come from
        row_of: dict[int, int] = {}
        while free and self._waiting:
            sequence = self._waiting[0][1]
            prompt, again = sequence.prompt, sequence.earlier is not None
            if again or (prompt.logits is None and id(prompt) not in row_of):
                row = self._read_on(sequence, reading)
                if row is None:
                    break
                sources.append(row)
                if not again:
                    row_of[id(prompt)] = row
                    prompt.pages = self._ledger.share(sequence.pages)
                    self._kept.append(prompt)
            else:
                if not self._room(1, keep=prompt):
                    if self._running():
                        break
                    self._drop(prompt)  # it fills the cache, and is read again for a sequence alone
                    continue
                sequence.pages = self._ledger.share(prompt.pages)
                sources.append(prompt if prompt.logits is not None else row_of[id(prompt)])
            heapq.heappop(self._waiting)
            sequence.slot, sequence.status = free.pop(), Status.RUNNING
            self._slots[sequence.slot] = sequence
            begun.append(sequence)
        logits = self._read(reading) if reading.parts else None
        if begun:
            self._begin(begun, logits, sources)

    def _read_on(self, sequence: Sample, reading: Reading) -> int | None:
        """Takes in as much of the text of the next sequence as the step allows.

        Returns:
            The row of the text's end; None while it is not reached, or where there is no room.
        """
        done = sequence.stored if sequence.pages else 0
        tokens = sequence.text[done : done + reading.allows(len(sequence.text) - done)]
        if not tokens:
            return None
        if not sequence.pages:
            needed = self._ledger.needed(len(sequence.text))
            if not self._room(needed):
                return None
            sequence.pages = self._ledger.take(needed)
        row = reading.add(Part(tokens, done, sequence.pages))
        sequence.stored = done + len(tokens)
        return row if sequence.stored == len(sequence.text) else None

    def _half_read(self) -> list[Sample]:
        return [sequence for _, sequence in sorted(self._waiting) if sequence.pages]

    def _give_up(self, sequence: Sample) -> None:
        """What was read for a sequence that waits is not kept."""
        self._ledger.give_back(sequence.pages)
        sequence.pages = []

    def _room(self, pages: int, keep: Prompt | None = None) -> bool:
        """Whether so many pages are free besides one for each lane in use; for a first sequence, they are made free."""
        running = len(self._running())
        if not running:
            self._forget(pages, keep)
            for sequence in self._half_read()[::-1]:
                if self._ledger.free < pages:
                    self._give_up(sequence)
        return self._ledger.free >= pages + running

    def _begin(self, begun: list[Sample], read: torch.Tensor | None, sources: list[int | Prompt]) -> None:
        """Draws the first token of those that begin, from logits after what was `read` or of prompts that are kept."""
        kept = [source for source in dict.fromkeys(sources) if isinstance(source, Prompt)]
        logits = [] if read is None else [read]
        first = 0 if read is None else read.shape[0]
        logits += [prompt.logits[None] for prompt in kept if prompt.logits is not None]
        place = {id(prompt): first + i for i, prompt in enumerate(kept)}
        rows = [place[id(source)] if isinstance(source, Prompt) else source for source in sources]
        every = torch.cat(logits)
        self._lanes.start(
            [sequence.slot for sequence in begun],
            [sequence.name for sequence in begun],
            [len(sequence.text) for sequence in begun],
            [sequence.limit for sequence in begun],
            [sequence.pages for sequence in begun],
            [sequence.earlier for sequence in begun],
            every.index_select(0, on_device(rows, every.device)),
        )
        for sequence in begun:
            sequence.stored = len(sequence.text)
            sequence.drawn = sequence.stored - len(sequence.prompt.tokens) + 1
            if sequence.earlier is None:
                self._admitted(sequence)
        for row, sequence in zip(rows, begun, strict=True):
            prompt = sequence.prompt
            if sequence.earlier is None and prompt.unread and prompt.logits is None:
                prompt.logits = every[row].clone()
        for sequence in begun:
            sequence.earlier = None
        self._retire()

    def _read(self, reading: Reading) -> torch.Tensor:
        """Logits [n, V] after parts of texts, which their pages hold from then on."""
        steps = self._steps
        tokens, lengths, table, *stored = reading.arrays(self._ledger.size, self._lanes.device)
        return self._policy.read_into(steps.params, tokens, lengths, table, steps.pages, *stored)

    def _admitted(self, sequence: Sample) -> None:
        """One sequence less waits for its prompt to be read; after the last one it is forgotten."""
        prompt = sequence.prompt
        prompt.unread -= 1
        if not prompt.unread and prompt in self._kept:
            self._drop(prompt)

    def _drop(self, prompt: Prompt) -> None:
        self._ledger.give_back(prompt.pages)
        prompt.pages, prompt.logits = [], None
        self._kept.remove(prompt)

    def _forget(self, pages: int, keep: Prompt | None = None) -> None:
        """Prompts kept for sequences to come are given up, the youngest first, until so many pages are free."""
        for prompt in self._kept[::-1]:
            if self._ledger.free >= pages:
                return
            if prompt is not keep:
                self._drop(prompt)

    # ------------------------------------------------------------------------------------ pages

    def _grow(self) -> None:
        """Every sequence that runs gets a page of its own for the token it reads next."""
        taken: list[tuple[Sample, int, Copy | None]] = []
        for sequence in sorted(self._running(), key=lambda s: s.order):
            while sequence.status is Status.RUNNING and self._ledger.lacks(sequence.pages, sequence.stored):
                if self._ledger.free:
                    copy = self._ledger.owned(sequence.pages, sequence.stored)
                    taken.append((sequence, sequence.stored // self._ledger.size, copy))
                else:
                    self._make_room()
        # one that got a page may have had to give it back for an older one
        taken = [entry for entry in taken if entry[0].status is Status.RUNNING]
        if taken:
            sequences, indices, copies = zip(*taken, strict=True)
            pages = [sequence.pages[index] for sequence, index, _ in taken]
            self._lanes.taken([sequence.slot for sequence in sequences], indices, pages)
            self._copy([copy for copy in copies if copy is not None])

    def _copy(self, copies: list[Copy]) -> None:
        if copies:
            source, target = (on_device(x, self._lanes.device) for x in zip(*copies, strict=True))
            for leaf in (*self._steps.pages.keys, *self._steps.pages.values):
                leaf[target] = leaf[source]

    def _make_room(self) -> None:
        """Frees at least one page, by the first of the rules that does."""
        half_read = self._half_read()
        if self._kept:
            self._drop(self._kept[-1])
        elif half_read:
            self._give_up(half_read[-1])
        elif self._pending:
            self._settle(keep=0)
            self._retire()
        else:
            self._set_back(max(self._running(), key=lambda s: s.order))

    def _set_back(self, sequence: Sample) -> None:
        """A sequence gives back its pages and waits, with what it has drawn; all steps have been seen.

        One that ended with the very token it began with has ended; no step has told the host yet.
        """
        earlier = self._lanes.gather([sequence.slot])
        self._leave(sequence)
        if bool(earlier.stopped[0]):
            self._finished.append(Finished([sequence], earlier))
            sequence.status = Status.DONE
            return
        sequence.earlier = earlier
        drawn = earlier.tokens[0, : sequence.drawn].tolist()
        sequence.text, sequence.status = sequence.prompt.tokens + drawn, Status.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def _leave(self, sequence: Sample) -> None:
        self._lanes.clear([sequence.slot])
        self._slots[sequence.slot] = None
        self._ledger.give_back(sequence.pages)
        sequence.pages = []

    # ------------------------------------------------------------------------------------ steps

    def _launch(self) -> None:
        running = self._running()
        last = max(sequence.slot for sequence in running)
        rows = next(size for size in self._buckets if size > last)
        self._steps.run(rows, max(sequence.stored for sequence in running))
        for sequence in running:
            sequence.stored += 1
            sequence.drawn += 1
        self._pending.append(_pending(list(self._slots[:rows]), self._lanes.state[:rows]))

    def _settle(self, keep: int) -> None:
        """Looks at the results of all steps but the last `keep`."""
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            if pending.ready is not None:
                pending.ready.synchronize()
            for sequence, state in zip(pending.sequences, pending.state.tolist(), strict=True):
                if sequence is not None and sequence.status is Status.RUNNING and state < 0:
                    sequence.drawn = sequence.limit = -state

    def _retire(self) -> None:
        """Sequences that have drawn all they may leave, with what they have drawn."""
        ended = [sequence for sequence in self._running() if sequence.drawn >= sequence.limit]
        if not ended:
            return
        slots = [sequence.slot for sequence in ended]
        self._finished.append(Finished(ended, self._lanes.gather(slots)))
        self._lanes.clear(slots)
        for sequence in ended:
            self._slots[sequence.slot] = None
            self._ledger.give_back(sequence.pages)
            sequence.pages, sequence.status = [], Status.DONE

    def _close_up(self) -> None:
        """Moves sequences to the first lanes, where fewer lanes are enough then."""
        running = self._running()
        if not running:
            return
        last = max(sequence.slot for sequence in running)
        if next(size for size in self._buckets if size > last) == next(s for s in self._buckets if s >= len(running)):
            return
        self._lanes.move([sequence.slot for sequence in running])
        self._slots = [*running, *[None] * (len(self._slots) - len(running))]
        for slot, sequence in enumerate(running):
            sequence.slot = slot


def _pending(sequences: list[Sample | None], state: torch.Tensor) -> _Pending:
    """The state of lanes on its way to the host."""
    if state.device.type == "cpu":
        return _Pending(sequences, state.clone(), None)
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
    host.copy_(state, non_blocking=True)
    ready = torch.cuda.current_stream(state.device).record_event()
    return _Pending(sequences, host, ready)
