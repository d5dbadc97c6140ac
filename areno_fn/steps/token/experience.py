"""From a judged rollout to the micro-batches of an update. Everything here is data: no model, no gradient."""

from __future__ import annotations

import torch

from areno_fn import tree
from areno_fn.contracts.batch import Experience, PackedTokens, Rollout
from areno_fn.contracts.errors import DataError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.random import permutation
from areno_fn.steps.token.pack import places, plan


def experience(
    rollout: Rollout,
    advantages: torch.Tensor,
    *,
    micro_tokens: int,
    rows: torch.Tensor | None = None,
    mask_truncated: bool = False,
) -> tuple[Experience, ...]:
    """Packs a rollout into micro-batches whose decisions are the drawn tokens.

    A document is a prompt and its completion, the stop token included; the recorded log-probabilities become
    `old`, and a row's advantage belongs to each of its decisions.

    Args:
        rollout: B sequences.
        advantages: float32 [B].
        micro_tokens: the budget of `pack.plan`, prompts counted.
        rows: int64, the rows to use; all when omitted.
        mask_truncated: rows that were cut off by the length limit get weight 0, so that they are neither
            in the numerator nor in the denominator of the objective.

    Returns:
        The micro-batches, which hold every row once.

    Raises:
        RecordError: there is not one advantage per row.
    """
    if advantages.shape != rollout.lengths.shape:
        raise RecordError(
            f"advantages have shape {tuple(advantages.shape)}, but the rollout has {rollout.lengths.shape[0]} rows; give one a row"
        )
    counted = rollout.finished if mask_truncated else torch.ones_like(rollout.finished)
    whole = (rollout, advantages.float(), counted.float())
    if rows is not None:
        whole = _take(whole, rows)
    lengths = whole[0].prompts.lengths + whole[0].lengths
    batches = plan(lengths.tolist(), micro_tokens)
    return tuple(_pack(*_take(whole, torch.tensor(batch, device=lengths.device))) for batch in batches)


def minibatches(rows: int, count: int, key: Key) -> tuple[torch.Tensor, ...]:
    """Splits the rows of a rollout into mini-batches: one update each, every row in exactly one.

    Args:
        rows: how many there are.
        count: number of mini-batches; their sizes differ by at most one.
        key: shuffles the rows.

    Returns:
        `count` index tensors, int64.

    Raises:
        DataError: there are fewer rows than mini-batches.
    """
    if not 1 <= count <= rows:
        raise DataError(f"{rows} sequences cannot be split into {count} mini-batches; use between 1 and {rows}")
    return permutation(key, rows).tensor_split(count)


def with_reference(batch: Experience, reference: torch.Tensor) -> Experience:
    """The same experience with the log-probabilities [M] that a frozen reference gives its decisions."""
    return replace(batch, reference=reference)


def _pack(rollout: Rollout, advantages: torch.Tensor, counted: torch.Tensor) -> Experience:
    prompts = rollout.prompts
    lengths = prompts.lengths + rollout.lengths
    segments, positions = places(lengths)
    column = positions - prompts.lengths[segments]  # in the completion; negative in the prompt
    drawn = column >= 0
    tokens = torch.empty_like(segments)
    tokens[~drawn] = prompts.tokens[segments[~drawn], positions[~drawn]]
    tokens[drawn] = rollout.tokens[segments[drawn], column[drawn]]
    (chosen,) = drawn.nonzero(as_tuple=True)
    row = segments[chosen]
    packed = PackedTokens(
        tokens=tokens,
        positions=positions,
        segments=segments,
        index=chosen - 1,
        targets=tokens[chosen],
        weight=counted[row],
        kept=None if rollout.kept is None else rollout.kept[row, column[chosen]],
        documents=lengths.shape[0],
        longest=int(lengths.max()),
    )
    return Experience(packed=packed, old=rollout.logp[row, column[chosen]], advantage=advantages[row])


def _take(
    batch: tuple[Rollout, torch.Tensor, torch.Tensor], rows: torch.Tensor
) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    return tree.map(lambda x: x[rows], batch)
