"""Requests that come and go at any time, on one cache of pages: admission, cancellation, and new weights in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked, received
from areno_fn.contracts.errors import DataError, ModelError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.batching import READ_TOKENS, Batch
from areno_fn.steps.token.checks import check_stops, is_whole, require_paged_policy
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
        SpecError: it is no `PagedPolicy`, the distribution is none, a number is below 1, or the cache does not hold one
            request of `longest` tokens.
        RecordError: an argument is of another type.
    """

    @checked
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
        require_paged_policy(policy)
        check_stops(policy, stop)
        check_sampling(sampling)
        sizes = {"rows": rows, "pages": pages, "page_size": page_size, "longest": longest, "read_tokens": read_tokens}
        for what, count in sizes.items():
            if count is not None and count < 1:
                raise SpecError(f"a server needs {what} of at least 1, received {count}")
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(params)):
            raise ModelError(
                f"a server needs the weights of a model, received {received(params)} without a tensor in it"
            )
        self._policy, self._sampling = policy, sampling
        self._open: dict[int, Sample] = {}
        self._whole = True
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
        self._forms = _forms(params)

    @property
    def open(self) -> tuple[int, ...]:
        """Names of the requests that have neither ended nor been cancelled."""
        return tuple(self._open)

    @property
    def free_pages(self) -> int:
        """Pages of the cache that nobody owns."""
        return self._batch.free_pages

    @checked
    def submit(self, prompt: Collection[int], names: Collection[int], max_tokens: int | None = None) -> None:
        """Asks for one completion of a prompt for each name; the prompt is read once for all of them.

        Args:
            prompt: token ids.
            names: what the draws of each completion are keyed by.
            max_tokens: most tokens to draw; that of the sampling when omitted.

        Raises:
            DataError: the prompt is empty or has a token that the model does not know, or a name is in use, none, or missing.
            SpecError: the prompt and its completion may become too long, or a step was interrupted.
            RecordError: an argument is of another type.
        """
        self._require_whole()
        tokens, names = [_plain(token) for token in prompt], [_plain(name) for name in names]
        if not tokens or not all(is_whole(token) and 0 <= token < self._policy.vocab_size for token in tokens):
            raise DataError(
                f"a prompt must have at least one token, each in [0, {self._policy.vocab_size}), received {tokens}"
            )
        if not names:
            raise DataError("a prompt is continued once for each name, and was given none; give every request a name")
        for name in names:
            if not is_whole(name) or not -(1 << 63) <= name < 1 << 63:
                raise DataError(f"the name of a request must be a whole number of 64 bits, received {name!r}")
        counted = Counter([*names, *self._open])
        twice = [name for name in names if counted[name] > 1]
        if twice:
            raise DataError(f"the name {twice[0]} is in use, and would draw alike; give every request its own name")
        limit = self._sampling.max_tokens if max_tokens is None else max_tokens
        shared = Prompt(tokens=tokens)
        for name in names:
            sequence = Sample(name=name, prompt=shared, limit=limit)
            self._batch.add(sequence)
            self._open[name] = sequence

    @checked
    def cancel(self, name: int) -> None:
        """Ends a request without a completion; its pages are free at once.

        Raises:
            DataError: there is no open request of that name.
        """
        self._require_whole()
        if name not in self._open:
            raise DataError(f"there is no open request {name} to cancel; it has ended or never came")
        self._batch.cancel(self._open.pop(name))

    @checked
    def load(self, params: Any, key: Key) -> None:
        """Goes on with other weights and another key. Open requests keep what they have drawn, which is read again.

        Raises:
            ModelError: the weights are not like those before in structure, shapes, dtypes and devices; those stay in use.
        """
        given = _forms(params)
        if given != self._forms:
            raise ModelError(f"weights to go on with must be like those before, but {_differs(self._forms, given)}")
        with self._uninterrupted():
            self._batch.load(params, key)

    def step(self) -> list[Completion]:
        """One token for every request that is decoded; the completions that have ended.

        Raises:
            SpecError: a step before it was interrupted.
        """
        with self._uninterrupted():
            return [done for finished in self._batch.advance() for done in self._completions(finished)]

    def drain(self) -> list[Completion]:
        """Steps until no request is open."""
        done: list[Completion] = []
        while self._open:
            done += self.step()
        return done

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """What must come to its end, or nobody knows what the cache holds."""
        self._require_whole()
        self._whole = False
        with torch.no_grad():
            yield
        self._whole = True

    def _require_whole(self) -> None:
        if not self._whole:
            raise SpecError(
                "a step of this server did not come to its end, and what its cache holds is not known; make another, and "
                "submit what is open again: each request gets what it would have got"
            )

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


def _plain(value: Any) -> Any:
    """An element of an array as the number that it is."""
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value


def _forms(params: Any) -> dict[str, str]:
    """By path, what a kernel sees of a leaf beside its numbers."""
    return {path: _form(leaf) for path, leaf in tree.leaves_with_path(params)}


def _form(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)} on {leaf.device}" if isinstance(leaf, torch.Tensor) else received(leaf)


def _differs(before: dict[str, str], after: dict[str, str]) -> str:
    """The first leaf that is another, in words."""
    path = next(path for path in {**before, **after} if before.get(path) != after.get(path))
    return f"{path} is {after.get(path, 'not there')} and was {before.get(path, 'not there')}"
