"""Requests that come and go at any time, on one cache of pages: admission, cancellation, and new weights in between."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.batching import READ_TOKENS, Batch
from areno_fn.steps.token.checks import check_stops
from areno_fn.steps.token.sampling import check_sampling
from areno_fn.steps.token.sequences import Finished, Prompt, Sample


@attrs.frozen(kw_only=True)
class Completion:
    """What one request has drawn.

    Attributes:
        name: of the request.
        tokens: the stop token included where one was drawn.
        logp: of each token under the distribution it was drawn from.
        finished: a stop token was drawn; False where the length limit cut the completion off.
    """

    name: int
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    finished: bool


class Server:
    """Continues prompts as they come. What a request gets is a function of the weights, the key, its name and its prompt.

    Args:
        policy: the model.
        stop: tokens that end a completion.
        sampling: the distribution of all requests; `max_tokens` is the most that one may ask for.
        params: the weights to begin with; `load` brings others.
        key: the random stream.
        rows: most requests that are decoded at once.
        pages: pages of the cache, of which one is nobody's.
        page_size: tokens a page holds.
        longest: most tokens of a prompt and its completion; the model's positions when omitted.
        capture: whether token steps are captured on a GPU.
        read_tokens: most tokens of prompts, padding included, that a step reads; a longer prompt is read in parts, one a
            step, while the other requests go on.

    Raises:
        ModelError: a stop token is not in the model's vocabulary.
        SpecError: the distribution is none, there is no token to read, or the cache does not hold one request of
            `longest` tokens.
    """

    def __init__(
        self,
        policy: PagedPolicy,
        stop: Collection[int],
        sampling: Sampling,
        params: Any,
        key: Key,
        *,
        rows: int,
        pages: int,
        page_size: int = 32,
        longest: int | None = None,
        capture: bool = True,
        read_tokens: int = READ_TOKENS,
    ) -> None:
        check_stops(policy, stop)
        check_sampling(sampling)
        self._policy, self._sampling = policy, sampling
        self._open: dict[int, Sample] = {}
        with torch.no_grad():
            self._batch = Batch(
                policy,
                stop,
                sampling,
                params,
                rows=rows,
                pages=pages,
                page_size=page_size,
                longest=policy.max_positions if longest is None else min(longest, policy.max_positions),
                device=tree.leaves(params)[0].device,
                capture=capture,
                read_tokens=read_tokens,
            )
            self._batch.load(params, key)

    @property
    def open(self) -> tuple[int, ...]:
        """Names of the requests that have neither ended nor been cancelled."""
        return tuple(self._open)

    @property
    def free_pages(self) -> int:
        """Pages of the cache that nobody owns."""
        return self._batch.free_pages

    def submit(self, prompt: Sequence[int], names: Sequence[int], max_tokens: int | None = None) -> None:
        """Asks for one completion of a prompt for each name; the prompt is read once for all of them.

        Args:
            prompt: token ids.
            names: what the draws of each completion are keyed by.
            max_tokens: most tokens to draw; that of the sampling when omitted.

        Raises:
            DataError: the prompt is empty or has a token that the model does not know, or a name is in use.
            SpecError: the prompt and its completion may become too long.
        """
        if not prompt or not all(0 <= token < self._policy.vocab_size for token in prompt):
            raise DataError(
                f"a prompt must have at least one token, each in [0, {self._policy.vocab_size}), received {list(prompt)}"
            )
        twice = [name for name in names if name in self._open or names.count(name) > 1]
        if twice:
            raise DataError(f"the name {twice[0]} is in use, and would draw alike; give every request its own name")
        shared = Prompt(tokens=list(prompt))
        for name in names:
            limit = self._sampling.max_tokens if max_tokens is None else max_tokens
            sequence = Sample(name=name, prompt=shared, limit=limit)
            self._batch.add(sequence)
            self._open[name] = sequence

    def cancel(self, name: int) -> None:
        """Ends a request without a completion; its pages are free at once.

        Raises:
            DataError: there is no open request of that name.
        """
        if name not in self._open:
            raise DataError(f"there is no open request {name} to cancel; it has ended or never came")
        self._batch.cancel(self._open.pop(name))

    def load(self, params: Any, key: Key) -> None:
        """Goes on with other weights and another key. Open requests keep what they have drawn, which is read again."""
        with torch.no_grad():
            self._batch.load(params, key)

    def step(self) -> list[Completion]:
        """One token for every request that is decoded; the completions that have ended."""
        with torch.no_grad():
            return [done for finished in self._batch.advance() for done in self._completions(finished)]

    def drain(self) -> list[Completion]:
        """Steps until no request is open."""
        done: list[Completion] = []
        while self._open:
            done += self.step()
        return done

    def _completions(self, finished: Finished) -> Iterator[Completion]:
        columns = finished.columns
        tokens, logp = columns.tokens.tolist(), columns.logp.tolist()
        ends = zip(columns.lengths.tolist(), columns.stopped.tolist(), strict=True)
        for row, (sequence, (length, stopped)) in enumerate(zip(finished.sequences, ends, strict=True)):
            if self._open.get(sequence.name) is not sequence:
                continue  # it was cancelled after its last token
            del self._open[sequence.name]
            yield Completion(
                name=sequence.name, tokens=tuple(tokens[row][:length]), logp=tuple(logp[row][:length]), finished=stopped
            )
