"""Packing: documents laid end to end without padding, in micro-batches that hold a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from areno_fn.contracts.batch import Example, PackedTokens
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import DataError
from areno_fn.steps.token.sizes import alike, plan_alike


@checked
def pack(examples: Sequence[Example]) -> PackedTokens:
    """Lays examples end to end; their trained tokens become the decisions.

    A decision stands one place before its target, in the same document: no document predicts the start of
    the next, and nothing depends on the value of a token (a padding or end token is a target like any other
    when it is flagged). Rows without a trained token are legal and add no decision.

    Args:
        examples: at least one, each with at least one token.

    Returns:
        N packed tokens, M decisions of weight 1, on the CPU.

    Raises:
        DataError: no example, an example without tokens, flags that do not fit the tokens, or a first
            token that is flagged as a target.
    """
    if not examples:
        raise DataError("there is nothing to pack; give at least one example")
    for example in examples:
        _check(example)
    lengths = torch.tensor([len(example.tokens) for example in examples])
    tokens = torch.tensor(list(chain.from_iterable(example.tokens for example in examples)))
    trained = torch.tensor(list(chain.from_iterable(example.trained for example in examples)))
    segments, positions = places(lengths)
    (chosen,) = trained.nonzero(as_tuple=True)
    return PackedTokens(
        tokens=tokens,
        positions=positions,
        segments=segments,
        index=chosen - 1,
        targets=tokens[chosen],
        weight=torch.ones(chosen.shape[0]),
        documents=len(examples),
        longest=int(lengths.max()),
    )


def plan(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Assigns whole documents to micro-batches of at most `micro_tokens` tokens, a pure function of the lengths.

    Documents of similar length travel together, the longest first: attention then pads little, and the
    largest micro-batch, which decides whether memory suffices, comes first. A document longer than the
    budget is alone in its micro-batch.

    Args:
        lengths: tokens per document.
        micro_tokens: the budget, at least 1.

    Returns:
        For every micro-batch the indices of its documents; each index occurs exactly once.
    """
    if micro_tokens < 1:
        raise DataError(f"a micro-batch must hold at least 1 token, received micro_tokens={micro_tokens}")
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] > room:
            batches.append([])
            room = micro_tokens
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def micro_batches(
    examples: Sequence[Example], micro_tokens: int, *, few_sizes: bool = False
) -> tuple[PackedTokens, ...]:
    """Examples packed into the micro-batches of `plan`; or, of few sizes, of `areno_fn.steps.token.sizes`."""
    lengths = [len(example.tokens) for example in examples]
    if few_sizes:
        batches = plan_alike([(length,) for length in lengths], micro_tokens)
        return alike([pack([examples[i] for i in rows]) for rows in batches])
    return tuple(pack([examples[i] for i in rows]) for rows in plan(lengths, micro_tokens))


def places(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each packed token, and its place in that document; int64 [N] each."""
    count = torch.arange(lengths.shape[0], device=lengths.device)
    segments = count.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return segments, torch.arange(segments.shape[0], device=lengths.device) - starts[segments]


def _check(example: Example) -> None:
    if not example.tokens:
        raise DataError(f"row {example.row} has no tokens; drop it, or give it a text")
    if len(example.tokens) != len(example.trained):
        raise DataError(
            f"row {example.row} has {len(example.tokens)} tokens and {len(example.trained)} flags; give one flag a token"
        )
    if example.trained[0]:
        raise DataError(
            f"row {example.row} trains on its first token, which nothing precedes; its first flag must be False"
        )
