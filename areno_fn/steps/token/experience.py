"""From a judged rollout to the micro-batches of an update. Everything here is data: no model, no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn import tree
from areno_fn.contracts.batch import Experience, PackedTokens, Rollout
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import DataError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record
from areno_fn.random import permutation
from areno_fn.steps.chosen import require_rows
from areno_fn.steps.objectives.kl import kl
from areno_fn.steps.token.pack import places, plan
from areno_fn.steps.token.sizes import alike, plan_alike


@checked
def experience(
    rollout: Rollout,
    advantages: torch.Tensor,
    *,
    micro_tokens: int,
    rows: torch.Tensor | None = None,
    mask_truncated: bool = False,
    reference: torch.Tensor | None = None,
    old: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    few_sizes: bool = False,
) -> tuple[Experience, ...]:
    """Packs a rollout into micro-batches whose decisions are the drawn tokens.

    A document is a prompt and its completion, the stop token included. The recorded log-probabilities become
    `old`, unless others are given; then they become `rollout`.

    Args:
        rollout: B sequences of at most T drawn tokens.
        advantages: float32 [B], a row's belongs to each of its decisions; or [B, T], one for every decision.
        micro_tokens: the budget of `pack.plan`, prompts counted.
        rows: int64 [M], the rows to use, negative ones counted from the end; all when omitted.
        mask_truncated: rows that were cut off by the length limit get weight 0, so that they are neither
            in the numerator nor in the denominator of the objective.
        reference: float32 [B, T], what a frozen reference says of the drawn tokens; see `over_completions`.
        old: float32 [B, T], log-probabilities of the drawn tokens under the parameters that drew them, computed again.
        values: float32 [B, T], what a critic said of the drawn tokens.
        returns: float32 [B, T], what came of them.
        few_sizes: in micro-batches of `areno_fn.steps.token.sizes` instead of those of `pack.plan`.

    Returns:
        The micro-batches, which hold every row once.

    Raises:
        RecordError: there is not one advantage per row or per drawn token, another matrix has the wrong shape, or a row does not
            exist.
    """
    if advantages.shape not in (rollout.lengths.shape, rollout.tokens.shape):
        raise RecordError(
            f"advantages have shape {tuple(advantages.shape)}, but the rollout has {rollout.lengths.shape[0]} rows; give one a row"
        )
    given = {"reference": reference, "old": old, "values": values, "returns": returns}
    for name, matrix in given.items():
        if matrix is not None and matrix.shape != rollout.tokens.shape:
            raise RecordError(
                f"{name} has shape {tuple(matrix.shape)}, but the rollout's tokens {tuple(rollout.tokens.shape)}"
            )
    counted = rollout.finished if mask_truncated else torch.ones_like(rollout.finished)
    spread = advantages.float() if advantages.ndim == 2 else advantages.float()[:, None].expand(rollout.tokens.shape)
    whole = _Judged(rollout=rollout, advantages=spread, counted=counted.float(), **given)
    if rows is not None:
        require_rows(rows, rollout.lengths.shape[0], "the rollout")
        whole = _take(whole, rows)
    lengths = whole.rollout.prompts.lengths + whole.rollout.lengths
    known = lengths.tolist()
    batches = plan_alike([(length,) for length in known], micro_tokens) if few_sizes else plan(known, micro_tokens)
    packed = tuple(_pack(_take(whole, torch.tensor(batch, device=lengths.device))) for batch in batches)
    return alike(packed) if few_sizes else packed


def over_completions(
    compute: Callable[[PackedTokens], torch.Tensor], rollout: Rollout, micro_tokens: int
) -> torch.Tensor:
    """A number for every drawn token, such as its log-probability under some parameters, computed in micro-batches.

    Args:
        compute: gives the numbers [M] of packed documents.
        rollout: B sequences.
        micro_tokens: the budget of `pack.plan`.

    Returns:
        float32 [B, T], 0 past a row's length.
    """
    found = torch.zeros_like(rollout.logp)
    drawn = drawn_places(rollout)
    lengths = rollout.prompts.lengths + rollout.lengths
    nothing = torch.zeros_like(rollout.logp)
    whole = _Judged(rollout=rollout, advantages=nothing, counted=torch.ones_like(rollout.lengths).float())
    for batch in plan(lengths.tolist(), micro_tokens):
        rows = torch.tensor(batch, device=lengths.device)
        part = torch.zeros_like(found[rows])
        part[drawn[rows]] = compute(_pack(_take(whole, rows)).packed).to(part.dtype)
        found[rows] = part
    return found


def completion_kl(rollout: Rollout, reference: torch.Tensor, estimator: str = "k1") -> torch.Tensor:
    """The KL estimate of every completion from a reference: the sum over its drawn tokens, which a reward may be lowered by.

    Args:
        rollout: B sequences, with the log-probabilities they were drawn with.
        reference: float32 [B, T], as `over_completions` gives it.
        estimator: a name of `areno_fn.steps.objectives.kl.ESTIMATORS`.

    Returns:
        float32 [B].
    """
    return torch.where(drawn_places(rollout), kl(rollout.logp, reference, estimator), 0.0).sum(1)


def drawn_places(rollout: Rollout) -> torch.Tensor:
    """Where drawn tokens stand: bool [B, T]."""
    return torch.arange(rollout.tokens.shape[1], device=rollout.lengths.device) < rollout.lengths[:, None]


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


@record
class _Judged:
    """A rollout with what its rows and drawn tokens are given. All [B, T], but counted [B]."""

    rollout: Rollout
    advantages: torch.Tensor
    counted: torch.Tensor
    reference: torch.Tensor | None = None
    old: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


def _pack(judged: _Judged) -> Experience:
    rollout, prompts = judged.rollout, judged.rollout.prompts
    lengths = prompts.lengths + rollout.lengths
    segments, positions = places(lengths)
    column = positions - prompts.lengths[segments]  # in the completion; negative in the prompt
    drawn = column >= 0
    tokens = torch.empty_like(segments)
    tokens[~drawn] = prompts.tokens[segments[~drawn], positions[~drawn]]
    tokens[drawn] = rollout.tokens[segments[drawn], column[drawn]]
    (chosen,) = drawn.nonzero(as_tuple=True)
    row, place = segments[chosen], column[chosen]

    def of_decisions(matrix: torch.Tensor | None) -> torch.Tensor | None:
        return None if matrix is None else matrix[row, place]

    packed = PackedTokens(
        tokens=tokens,
        positions=positions,
        segments=segments,
        index=chosen - 1,
        targets=tokens[chosen],
        weight=judged.counted[row],
        kept=of_decisions(rollout.kept),
        documents=lengths.shape[0],
        longest=int(lengths.max()),
    )
    recorded = rollout.logp[row, place]
    again = of_decisions(judged.old)
    return Experience(
        packed=packed,
        old=recorded if again is None else again,
        advantage=judged.advantages[row, place],
        reference=of_decisions(judged.reference),
        rollout=None if again is None else recorded,
        values=of_decisions(judged.values),
        returns=of_decisions(judged.returns),
    )


def _take(judged: _Judged, rows: torch.Tensor) -> _Judged:
    taken: _Judged = tree.map(lambda x: x[rows], judged)
    return taken
