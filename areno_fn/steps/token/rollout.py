"""Rollouts: prompts continued by sampling, with all that is needed to score the same tokens again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from areno_fn import tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.calls import checked
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy
from areno_fn.contracts.policy import TokenPolicy, is_bitwise
from areno_fn.contracts.record import record
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.checks import check_prompts, check_stops, require_token_policy
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.sampling import Drawn, check_sampling, cuts, draw

T = TypeVar("T")


@checked
def sampler(policy: TokenPolicy, stop: Collection[int]) -> Callable[..., Rollout]:
    """A function that continues prompts until any of several stop tokens or the length limit.

    The function is `rollout(params, prompts, key, sampling, samples=1, max_rows=None) -> Rollout`. Sequence
    s of prompt p is named `p.id * samples + s`; what it draws is a function of the key, that name, the place
    of each token and the model's answer, whatever batch it is decoded in. Every prompt is read once and its
    cache is copied for its samples; sequences that have stopped leave the running batch.

    On a GPU a `PagedPolicy` is asked for the same through `PagedSampler`, which keeps its cache for the next call.

    Args:
        policy: the model.
        stop: token ids that end a sequence; the one that was drawn is part of the completion.

    Raises:
        SpecError: it is no `TokenPolicy`.
        ModelError: a stop token is not in the model's vocabulary.
    """
    require_token_policy(policy, "vocab_size", "max_positions", "prefill", "decode")
    check_stops(policy, stop)
    paged = PagedSampler(policy, stop) if isinstance(policy, PagedPolicy) else None

    @checked
    def rollout(
        params: Any, prompts: Prompts, key: Key, sampling: Sampling, samples: int = 1, max_rows: int | None = None
    ) -> Rollout:
        """Draws `samples` continuations of every prompt, rows ordered by prompt, without a gradient.

        Args:
            params: the model's parameters.
            prompts: B prompts with distinct ids.
            key: the random stream of this rollout.
            sampling: the distribution, and the length limit T.
            samples: continuations a prompt, at least 1.
            max_rows: most sequences decoded at once, which bounds the memory of the cache; the result does
                not depend on it. Prompts whose samples do not fit together are read once for each part.

        Returns:
            B * samples rows of T = `sampling.max_tokens` columns.

        Raises:
            DataError: there is no prompt, or a prompt is empty, too long for the model, or shares its id.
            SpecError: the distribution, `samples` or `max_rows` is none.
        """
        if paged is not None and prompts.ids.device.type == "cuda":
            return paged(params, prompts, key, sampling, samples, max_rows)
        check_sampling(sampling)
        check_prompts(policy, prompts, sampling, samples, max_rows)
        place = torch.arange(prompts.ids.shape[0] * samples, device=prompts.ids.device)
        owner = place // samples
        names = prompts.ids[owner] * samples + place % samples
        table = _stop_table(policy, stop, place.device)
        size = place.shape[0] if max_rows is None else max_rows
        with torch.no_grad():
            parts = [
                _continue(policy, table, params, prompts, rows, ids, key, sampling)
                for rows, ids in zip(torch.split(owner, size), torch.split(names, size), strict=True)
            ]
        prompts = tree.map(lambda x: x[owner], prompts)
        drawn = parts[0] if len(parts) == 1 else tree.map(lambda *rows: torch.cat(rows), *parts)
        return Rollout(
            prompts=prompts,
            groups=prompts.ids.clone(),
            ids=names,
            tokens=drawn.tokens,
            lengths=drawn.lengths,
            logp=drawn.logp,
            finished=drawn.finished,
            kept=drawn.kept,
        )

    return rollout


@record
class _Page:
    """What the rows of one running batch have drawn: R rows, T columns, written in place while it runs."""

    tokens: torch.Tensor
    logp: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor
    kept: torch.Tensor | None

    def write(self, slots: torch.Tensor, alive: torch.Tensor, t: int, drawn: Drawn, stopped: torch.Tensor) -> None:
        """Column t of the rows `slots`; those that are no longer alive keep what they have."""
        self.tokens[slots, t] = drawn.tokens.where(alive, 0)
        self.logp[slots, t] = drawn.logp.where(alive, 0.0)
        self.lengths[slots] += alive
        self.finished[slots] |= stopped
        if self.kept is not None and drawn.kept is not None:
            self.kept[slots, t] = drawn.kept.where(alive, 1)


def _blank(names: torch.Tensor, limit: int, *, counted: bool) -> _Page:
    tokens = names.new_zeros(names.shape[0], limit)
    return _Page(
        tokens=tokens,
        logp=torch.zeros_like(tokens, dtype=torch.float32),
        lengths=torch.zeros_like(names),
        finished=torch.zeros_like(names, dtype=torch.bool),
        kept=torch.ones_like(tokens) if counted else None,
    )


def _continue(
    policy: TokenPolicy,
    stops: torch.Tensor,
    params: Any,
    prompts: Prompts,
    owner: torch.Tensor,
    names: torch.Tensor,
    key: Key,
    sampling: Sampling,
) -> _Page:
    """Decodes the rows `names`, of which row i continues prompt `owner[i]`, together."""
    limit, starts = sampling.max_tokens, prompts.lengths[owner]
    logits, cache = _read(policy, params, prompts, owner, limit)
    page = _blank(names, limit, counted=cuts(sampling, policy.vocab_size))
    slots = torch.arange(names.shape[0], device=names.device)  # of the rows that run
    alive = torch.ones_like(slots, dtype=torch.bool)
    for t in range(limit):
        drawn = draw(logits, sampling, key, names[slots], starts[slots] + t, rescored=is_bitwise(policy))
        stopped = stops[drawn.tokens] & alive
        page.write(slots, alive, t, drawn, stopped)
        alive = alive & ~stopped
        remaining = int(alive.sum())
        if remaining == 0 or t + 1 == limit:
            break
        tokens = drawn.tokens
        if 2 * remaining <= slots.shape[0]:
            (going_on,) = alive.nonzero(as_tuple=True)
            slots, alive, tokens, cache = _take((slots, alive, tokens, cache), going_on)
        logits, cache = policy.decode(params, tokens, cache)
    return page


def _read(
    policy: TokenPolicy, params: Any, prompts: Prompts, owner: torch.Tensor, limit: int
) -> tuple[torch.Tensor, Any]:
    """Reads each prompt once, and gives every row its own copy of the answer and of the cache."""
    first, last = int(owner[0]), int(owner[-1]) + 1
    lengths = prompts.lengths[first:last]
    longest = int(lengths.max())
    capacity = longest + limit - 1  # the last drawn token is never read
    logits, cache = policy.prefill(params, prompts.tokens[first:last, :longest], lengths, capacity)
    if owner.shape[0] == lengths.shape[0]:
        return logits, cache
    return _take((logits, cache), owner - first)


def _take(batch: T, rows: torch.Tensor) -> T:
    return tree.map(lambda x: x.index_select(0, rows), batch)


def _stop_table(policy: TokenPolicy, stop: Collection[int], device: torch.device) -> torch.Tensor:
    """Whether each token of the vocabulary ends a sequence, bool [V]."""
    table = torch.zeros(policy.vocab_size, dtype=torch.bool, device=device)
    table[list(stop)] = True
    return table
