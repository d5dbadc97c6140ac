"""Continuous batching: sequences enter a running batch as others leave it, and take pages of the cache as they grow.

Whatever the batch, a sequence gets what it would get alone: its draws are keyed by its name and its places, and rows do
not see each other. So the rules below decide about time and memory only:

* Sequences are admitted in the order they came, as long as a lane is free and there are pages for the text and one to
  spare for every lane in use.
* A prompt is read once for all its samples. They own its pages together, and copy the last one when they write to it. The
  prompt stays read until its last sample is admitted, or until its pages are needed.
* When no page is left for a sequence that grows, prompts kept for samples to come are forgotten first; then the
  sequences that came last give back theirs and wait. What these have drawn is kept, and read again with the prompt.
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
from areno_fn.steps.token.sequences import Finished, Prompt, Sample, Status

READ_TOKENS = 1 << 15
"""Most tokens, padding included, that are read at once, unless one text alone is longer."""


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

    Raises:
        SpecError: there are not enough pages for one sequence of `longest` tokens, or no lane.
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
    ) -> None:
        self._ledger = Ledger(pages, page_size)
        width = self._ledger.needed(longest)
        if rows < 1 or width > self._ledger.free:
            raise SpecError(
                f"a batch needs at least one lane and {width + 1} pages, which hold one sequence of {longest} tokens, "
                f"received {rows} and {pages} of {page_size} tokens"
            )
        self.rows, self.longest = rows, longest
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
        texts: list[Sample] = []  # one sequence for every text that must be read
        sources: list[int | Prompt] = []  # where the logits of each one that begins come from
        reading: dict[int, int] = {}
        while free and self._waiting:
            sequence = self._waiting[0][1]
            prompt, again = sequence.prompt, sequence.earlier is not None
            if again or (prompt.logits is None and id(prompt) not in reading):
                needed = self._ledger.needed(len(sequence.text))
                if not self._room(needed):
                    break
                sequence.pages = self._ledger.take(needed)
                sources.append(len(texts))
                if not again:
                    reading[id(prompt)] = len(texts)
                    prompt.pages = self._ledger.share(sequence.pages)
                    self._kept.append(prompt)
                texts.append(sequence)
            else:
                if not self._room(1, keep=prompt):
                    if self._running():
                        break
                    self._drop(prompt)  # it fills the cache, and is read again for a sequence alone
                    continue
                sequence.pages = self._ledger.share(prompt.pages)
                sources.append(prompt if prompt.logits is not None else reading[id(prompt)])
            heapq.heappop(self._waiting)
            sequence.slot, sequence.status = free.pop(), Status.RUNNING
            self._slots[sequence.slot] = sequence
            begun.append(sequence)
        if begun:
            self._begin(begun, texts, sources)

    def _room(self, pages: int, keep: Prompt | None = None) -> bool:
        """Whether so many pages are free besides one for each lane in use; for a first sequence, they are made free."""
        running = len(self._running())
        if not running:
            self._forget(pages, keep)
        return self._ledger.free >= pages + running

    def _begin(self, begun: list[Sample], texts: list[Sample], sources: list[int | Prompt]) -> None:
        """Reads texts, and draws the first token of those that begin."""
        kept = [source for source in dict.fromkeys(sources) if isinstance(source, Prompt)]
        logits = [self._read(part) for part in self._parts(texts)]
        logits += [prompt.logits[None] for prompt in kept if prompt.logits is not None]
        place = {id(prompt): len(texts) + i for i, prompt in enumerate(kept)}
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
        for row, text in enumerate(texts):
            if text.earlier is None and text.prompt.unread:
                text.prompt.logits = every[row].clone()
        for sequence in begun:
            sequence.earlier = None
        self._retire()

    def _parts(self, texts: list[Sample]) -> list[list[Sample]]:
        """Texts in their order, cut where one more would exceed `READ_TOKENS`."""
        parts: list[list[Sample]] = []
        longest = 0
        for text in texts:
            longest = max(longest, len(text.text))
            if not parts or longest * (len(parts[-1]) + 1) > READ_TOKENS:
                parts.append([])
                longest = len(text.text)
            parts[-1].append(text)
        return parts

    def _read(self, texts: list[Sample]) -> torch.Tensor:
        """Logits [n, V] after texts, which their pages hold from then on."""
        width = max(len(text.text) for text in texts)
        pages = max(len(text.pages) for text in texts)
        tokens = [text.text + [0] * (width - len(text.text)) for text in texts]
        table = [text.pages + [0] * (pages - len(text.pages)) for text in texts]
        lengths = [len(text.text) for text in texts]
        device, steps = self._lanes.device, self._steps
        arrays = on_device(tokens, device), on_device(lengths, device), on_device(table, device)
        return self._policy.read_into(steps.params, *arrays, steps.pages)

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
        if self._kept:
            self._drop(self._kept[-1])
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
