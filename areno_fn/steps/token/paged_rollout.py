"""Rollouts on a cache of pages, with continuous batching: `sampler` for models that can read from pages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.batching import READ_TOKENS, Batch
from areno_fn.steps.token.checks import check_prompts, check_stops, require_paged_policy
from areno_fn.steps.token.lanes import Columns, on_device
from areno_fn.steps.token.sampling import check_sampling, cuts
from areno_fn.steps.token.sequences import Finished, Prompt, Sample

SHARE = 0.25
"""Of the memory of a GPU that is free when a cache is allocated, how much it may take."""
LANES = 512
"""Most sequences that are decoded at once, where nothing else is said."""


class PagedSampler:
    """A function that continues prompts: `sampler(policy, stop)`, on pages.

    Called with the same arguments it returns what `sampler` returns: tokens are equal, and log-probabilities up to
    roundings. Its cache is allocated once and kept for the next call, as are captured steps; nothing that was read in
    one call is used in another. A call that does not fit the cache allocates another one.

    Args:
        policy: the model.
        stop: token ids that end a sequence; the one that was drawn is part of the completion.
        page_size: tokens a page holds.
        memory: most bytes of the cache. When omitted, what all lanes may need at once, though on a GPU at most a quarter
            of what is free.
        capture: whether token steps are captured on a GPU.
        read_tokens: most tokens of prompts, padding included, that are read between two token steps; a longer prompt is
            read in parts. It bounds the memory of reading and how long the others wait.

    Raises:
        ModelError: a stop token is not in the model's vocabulary.
        SpecError: it is no `PagedPolicy`, or the size of a page, the memory or the tokens to read are none.
    """

    @checked
    def __init__(
        self,
        policy: PagedPolicy,
        stop: Collection[int],
        *,
        page_size: int = 32,
        memory: int | None = None,
        capture: bool = True,
        read_tokens: int = READ_TOKENS,
    ) -> None:
        require_paged_policy(policy)
        check_stops(policy, stop)
        for name, value in (("page_size", page_size), ("memory", memory), ("read_tokens", read_tokens)):
            if value is not None and value < 1:
                raise SpecError(f"a cache of pages needs {name} of at least 1, received {value}")
        self.policy, self.stop = policy, tuple(stop)
        self.page_size, self.memory, self.capture, self.read_tokens = page_size, memory, capture, read_tokens
        self._batch: Batch | None = None
        self._made_for: tuple[Any, ...] = ()

    @checked
    def __call__(
        self, params: Any, prompts: Prompts, key: Key, sampling: Sampling, samples: int = 1, max_rows: int | None = None
    ) -> Rollout:
        """Draws `samples` continuations of every prompt; arguments, result and errors as for `sampler`.

        Raises:
            SpecError: also when the memory does not hold a single sequence.
        """
        check_sampling(sampling)
        check_prompts(self.policy, prompts, sampling, samples, max_rows)
        device = prompts.ids.device
        with torch.no_grad():
            lengths, ids = prompts.lengths.tolist(), prompts.ids.tolist()
            texts = [row[:length] for row, length in zip(prompts.tokens.tolist(), lengths, strict=True)]
            shared = [Prompt(tokens=text) for text in texts]
            sequences = [
                Sample(name=name * samples + s, prompt=prompt, limit=sampling.max_tokens)
                for name, prompt in zip(ids, shared, strict=True)
                for s in range(samples)
            ]
            batch = self._batch_for(params, sampling, max(lengths), len(sequences), max_rows, device)
            self._batch = None  # a call that is interrupted leaves sequences in it, which are not those of the next one
            batch.load(params, key)
            for sequence in sequences:
                batch.add(sequence)
            blank = _blank(len(sequences), sampling, self.policy.vocab_size, device)
            while not batch.idle:
                for finished in batch.advance():
                    _put(blank, [sequence.order - sequences[0].order for sequence in finished.sequences], finished)
            self._batch = batch
        place = torch.arange(len(sequences), device=device)
        owner = place // samples
        prompts = tree.map(lambda x: x[owner], prompts)
        return Rollout(
            prompts=prompts,
            groups=prompts.ids.clone(),
            ids=prompts.ids * samples + place % samples,
            tokens=blank.tokens,
            lengths=blank.lengths,
            logp=blank.logp,
            finished=blank.stopped,
            kept=blank.kept,
        )

    def release(self) -> None:
        """Gives the memory of the cache and of captured steps back; the next call allocates it again."""
        self._batch, self._made_for = None, ()

    def _batch_for(
        self, params: Any, sampling: Sampling, longest: int, count: int, max_rows: int | None, device: torch.device
    ) -> Batch:
        """The batch of the last call where it fits this one, and a new one otherwise."""
        longest += sampling.max_tokens
        rows = min(count, LANES if max_rows is None else max_rows)
        made_for = (sampling, device, tuple((x.shape, x.dtype, x.device) for x in tree.leaves(params)))
        batch = self._batch
        fits = batch is not None and self._made_for == made_for and batch.longest >= longest
        if batch is None or not fits or not rows <= batch.rows <= (max_rows or batch.rows):
            self._batch = batch = None  # its memory is free before the new one is taken
            width = -(-longest // self.page_size)
            self._batch = batch = Batch(
                self.policy,
                self.stop,
                sampling,
                params,
                rows=rows,
                pages=self._pages(params, 1 + rows * width, device),
                page_size=self.page_size,
                longest=longest,
                device=device,
                capture=self.capture,
                read_tokens=self.read_tokens,
            )
            self._made_for = made_for
        return batch

    def _pages(self, params: Any, most: int, device: torch.device) -> int:
        memory = self.memory
        if memory is None and device.type == "cuda":
            memory = int(SHARE * torch.cuda.mem_get_info(device)[0])
        return most if memory is None else min(most, memory // self.policy.page_bytes(params, self.page_size))


def _blank(count: int, sampling: Sampling, vocab_size: int, device: torch.device) -> Columns:
    """Columns of sequences that have drawn nothing."""
    tokens = torch.zeros(count, sampling.max_tokens, dtype=torch.int64, device=device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    kept = torch.ones_like(tokens) if cuts(sampling, vocab_size) else None
    return Columns(tokens, torch.zeros_like(tokens, dtype=torch.float32), kept, lengths, lengths.bool())


def _put(blank: Columns, rows: list[int], finished: Finished) -> None:
    """Writes the columns of sequences that have ended to their rows."""
    where = on_device(rows, blank.tokens.device)
    for target, source in zip(blank, finished.columns, strict=True):
        if target is not None and source is not None:
            target[where] = source
