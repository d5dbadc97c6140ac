"""What is refused before a model is asked for anything: what is no model, and prompts that cannot be continued."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral

import torch

from areno_fn.contracts.batch import Prompts
from areno_fn.contracts.calls import received
from areno_fn.contracts.errors import DataError, ModelError, SpecError
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import Sampling

_TOKEN_POLICY = (
    "a TokenPolicy has vocab_size, max_positions, hidden(params, tokens, positions, segments, bounds=...), "
    "logits(params, hidden), prefill(params, tokens, lengths, capacity) and decode(params, tokens, cache)"
)
_PAGED_POLICY = (
    "a PagedPolicy has vocab_size, max_positions, pages(params, count, size), page_bytes(params, size), "
    "read_into(params, tokens, lengths, table, pages, stored) and read_next(params, tokens, stored, table, pages, longest)"
)
_PAGED = ("vocab_size", "max_positions", "pages", "page_bytes", "read_into", "read_next")


def require_token_policy(policy: object, *parts: str) -> None:
    """Refuses what has not the parts of a `TokenPolicy` that it will be asked for.

    Raises:
        SpecError: names what is missing.
    """
    _require_parts(policy, parts, _TOKEN_POLICY)


def require_paged_policy(policy: object) -> None:
    """Refuses what has not the parts of a `PagedPolicy` that a rollout on pages asks for.

    Raises:
        SpecError: names what is missing.
    """
    _require_parts(policy, _PAGED, _PAGED_POLICY)


def _require_parts(policy: object, parts: Sequence[str], all_parts: str) -> None:
    kind = policy.__name__ if isinstance(policy, type) else type(policy).__name__
    missing = [name for name in parts if not hasattr(policy, name)]
    if missing:
        raise SpecError(f"the policy {kind} has no {missing[0]!r}; {all_parts}")
    if isinstance(policy, type):
        raise SpecError(f"the policy {kind} is a class; make one of it, as in {kind}(...)")


def check_stops(policy: TokenPolicy, stop: Collection[int]) -> None:
    """Refuses stop tokens that are not in the model's vocabulary.

    Raises:
        ModelError: names the token.
    """
    for token in stop:
        if not is_whole(token):
            raise ModelError(f"a stop token is a whole number, received {received(token)}; give the ids of tokens")
        if not 0 <= token < policy.vocab_size:
            raise ModelError(
                f"stop token {token} is not among the model's {policy.vocab_size} tokens and would never be drawn; remove it"
            )


def is_whole(value: object) -> bool:
    """Whether it is a whole number, as a token or a name is; `True` is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_prompts(
    policy: TokenPolicy, prompts: Prompts, sampling: Sampling, samples: int, max_rows: int | None
) -> None:
    """Refuses prompts that cannot be continued, and counts that are none.

    Raises:
        DataError: there is no prompt, or a prompt is empty, too long for the model, of tokens that it does not know, or
            shares its id.
        SpecError: `samples` or `max_rows` is none.
    """
    _counts(prompts, samples, max_rows)
    _texts(policy, prompts, sampling)


def _counts(prompts: Prompts, samples: int, max_rows: int | None) -> None:
    for name, count in (("samples", samples), ("max_rows", max_rows)):
        if count is not None and count < 1:
            raise SpecError(f"a rollout needs {name} of at least 1, received {count}")
    for name in prompts.ids.tolist():
        if not -(1 << 63) <= name * samples <= (1 << 63) - samples:
            raise DataError(
                f"the prompt id {name} times {samples} samples does not fit 64 bits, so sequences would share names; "
                "use smaller ids"
            )


def _texts(policy: TokenPolicy, prompts: Prompts, sampling: Sampling) -> None:
    ids, lengths = prompts.ids.tolist(), prompts.lengths.tolist()
    if not ids:
        raise DataError("a rollout needs at least one prompt")
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise DataError(
            f"two prompts have the id {twice} and would be continued alike; give every prompt of a batch its own id"
        )
    for name, length in zip(ids, lengths, strict=True):
        if not 1 <= length <= prompts.tokens.shape[1]:
            raise DataError(
                f"prompt {name} has length {length}, but must have between 1 and {prompts.tokens.shape[1]}, the width of the batch"
            )
        if length + sampling.max_tokens > policy.max_positions:
            raise DataError(
                f"prompt {name} has {length} tokens and may be continued by {sampling.max_tokens}, which is more than the "
                f"model's {policy.max_positions} positions; shorten the prompt or lower max_tokens"
            )
    places = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    strange = ((prompts.tokens < 0) | (prompts.tokens >= policy.vocab_size)) & (places < prompts.lengths[:, None])
    if bool(strange.any()):
        row, place = strange.nonzero()[0].tolist()
        raise DataError(
            f"prompt {ids[row]} has the token {int(prompts.tokens[row, place])} at place {place}, but the model knows 0 to "
            f"{policy.vocab_size - 1}; encode it with the model's tokenizer"
        )
