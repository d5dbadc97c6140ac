"""Batches of tokens. Shape letters: B sequences, L prompt length, T completion length, N packed tokens, M decisions."""

from __future__ import annotations

import attrs
import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import record, shown, static
from areno_fn.contracts.shapes import require_vectors


@attrs.frozen(kw_only=True)
class Example:
    """One tokenised training row, before packing.

    Attributes:
        tokens: the whole document, prompt and response.
        trained: one flag per token: True where the token is a target of the loss. The first is always False.
        row: index of the row in its data set, for messages.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    row: int = 0


@attrs.frozen(kw_only=True)
class Pair:
    """Two tokenised answers to one prompt, of which the first is preferred.

    Attributes:
        chosen: prompt and preferred answer.
        rejected: prompt and the other answer.
    """

    chosen: Example
    rejected: Example

    @property
    def documents(self) -> tuple[Example, Example]:
        """Both, the chosen one first."""
        return self.chosen, self.rejected


@attrs.frozen(kw_only=True)
class Drawn:
    """A prompt and one completion of it, as they were drawn.

    Attributes:
        tokens: those of the prompt, then those of the completion, the stop token included where one was drawn.
        finished: a stop token was drawn; False where the length limit cut the completion off.
    """

    tokens: tuple[int, ...]
    finished: bool


@record
class PackedTokens:
    """Documents laid end to end without padding, and the decisions that are scored in them.

    Decision j is the choice of `targets[j]` made by the model standing at `index[j]`; a document's first
    token is nobody's target, so no document ever predicts the start of the next.

    Attributes:
        tokens: int64 [N].
        positions: int64 [N], starting at 0 in every document.
        segments: int64 [N], the document of each token: 0, 0, .., 1, 1, .., non-decreasing without gaps.
        index: int64 [M], places in the stream.
        targets: int64 [M], the tokens chosen there.
        weight: float32 [M], what each decision counts for (1 for a response token).
        kept: int64 [M], how many tokens each decision was drawn among, when its distribution was truncated; None
            when nothing was cut off.
        documents: number of documents.
        longest: length of the longest document.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    index: torch.Tensor
    targets: torch.Tensor
    weight: torch.Tensor
    kept: torch.Tensor | None = None
    documents: int = static()
    longest: int = static()

    def __check__(self) -> None:
        require_vectors(self, "tokens", "positions", "segments")
        require_vectors(self, "index", "targets", "weight", "kept")
        for name in ("tokens", "positions", "segments", "index", "targets"):
            if getattr(self, name).dtype != torch.int64:
                raise RecordError(f"PackedTokens.{name} must be int64, received {shown(getattr(self, name))}")


@record
class Experience:
    """What a policy-gradient update needs besides the tokens; everything here is data, recorded earlier.

    Attributes:
        packed: the documents and their decisions.
        old: float32 [M], log-probability of each target under the behaviour policy's sampling distribution.
        advantage: float32 [M].
        reference: float32 [M], log-probability under the frozen reference, or None.
        rollout: float32 [M], what was recorded while sampling, where `old` was computed again; else None.
        values: float32 [M], what a critic said before the update, or None.
        returns: float32 [M], what came of the decisions, or None.
    """

    packed: PackedTokens
    old: torch.Tensor
    advantage: torch.Tensor
    reference: torch.Tensor | None = None
    rollout: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def __check__(self) -> None:
        for name in ("old", "advantage", "reference", "rollout", "values", "returns"):
            value = getattr(self, name)
            if value is not None and value.shape != self.packed.targets.shape:
                raise RecordError(
                    f"Experience.{name} has shape {tuple(value.shape)}, but there are {self.packed.targets.shape[0]} decisions"
                )


@record
class Pairs:
    """Pairs of documents: document 2k is preferred to document 2k + 1, and both are always in one batch.

    Attributes:
        packed: the documents and the decisions of their answers.
        reference: float32 [M], log-probability of each target under the frozen reference: data.
    """

    packed: PackedTokens
    reference: torch.Tensor

    def __check__(self) -> None:
        if self.packed.documents % 2:
            raise RecordError(f"Pairs need an even number of documents, received {self.packed.documents}")
        if self.reference.shape != self.packed.targets.shape:
            raise RecordError(
                f"Pairs.reference has shape {tuple(self.reference.shape)}, but there are {self.packed.targets.shape[0]} decisions"
            )


@record
class Prompts:
    """Prompts to be continued.

    Attributes:
        tokens: int64 [B, L], right-padded; what stands past a row's length is never read.
        lengths: int64 [B], at least 1.
        ids: int64 [B], the name of each prompt; draws are functions of it, so it must not depend on the batch.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor

    def __check__(self) -> None:
        if self.tokens.ndim != 2:
            raise RecordError(f"Prompts.tokens must be [B, L], received shape {tuple(self.tokens.shape)}")
        require_vectors(self, "lengths", "ids")
        _same_rows(self, "tokens", "lengths")


@record
class Rollout:
    """Sampled continuations, with all that is needed to replay them into an update. B rows = prompts x samples.

    Attributes:
        prompts: the prompt of every row (repeated for its samples).
        groups: int64 [B], rows with one number answer the same prompt.
        ids: int64 [B], the sequence id that the draws of a row were keyed by.
        tokens: int64 [B, T], right-padded with 0; the stop token, when one was drawn, is included.
        lengths: int64 [B], drawn tokens per row, at least 1.
        logp: float32 [B, T], log-probability of each drawn token under the distribution it was drawn from; 0 past the length.
        finished: bool [B], a stop token was drawn (False: cut off by the length limit).
        kept: int64 [B, T], how many tokens each one was drawn among, 1 past the length; None when the sampling
            distribution was not truncated.
    """

    prompts: Prompts
    groups: torch.Tensor
    ids: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    logp: torch.Tensor
    finished: torch.Tensor
    kept: torch.Tensor | None = None

    def __check__(self) -> None:
        require_vectors(self, "groups", "ids", "lengths", "finished")
        _same_rows(self, "tokens", "lengths")
        if self.kept is not None and self.kept.shape != self.tokens.shape:
            raise RecordError(
                f"Rollout.kept has shape {tuple(self.kept.shape)}, but tokens has {tuple(self.tokens.shape)}"
            )
        if self.tokens.shape != self.logp.shape:
            raise RecordError(
                f"Rollout.logp has shape {tuple(self.logp.shape)}, but tokens has {tuple(self.tokens.shape)}"
            )


@record
class JudgedRollout:
    """Sampled continuations and what the rewards said of them: the batch of a policy-gradient step.

    Attributes:
        rollout: B sequences.
        rewards: float32 [B], the weighted sum of the phase's rewards.
        reference: float32 [B, T], log-probabilities of the drawn tokens under a frozen reference; None where there is
            none, or where they have not been computed yet.
        old: float32 [B, T], the same under the parameters that drew them, computed again.
        values: float32 [B, T], what a critic said before each of them was drawn.
    """

    rollout: Rollout
    rewards: torch.Tensor
    reference: torch.Tensor | None = None
    old: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def __check__(self) -> None:
        for name in ("reference", "old", "values"):
            matrix = getattr(self, name)
            if matrix is not None and matrix.shape != self.rollout.tokens.shape:
                raise RecordError(
                    f"JudgedRollout.{name} has shape {tuple(matrix.shape)}, but the rollout's tokens "
                    f"{tuple(self.rollout.tokens.shape)}"
                )
        if self.rewards.shape != self.rollout.lengths.shape:
            raise RecordError(
                f"JudgedRollout.rewards has shape {tuple(self.rewards.shape)}, but there are "
                f"{self.rollout.lengths.shape[0]} sequences"
            )


def _same_rows(value: object, matrix: str, vector: str) -> None:
    table, rows = getattr(value, matrix), getattr(value, vector)
    if table.ndim != 2 or table.shape[0] != rows.shape[0]:
        raise RecordError(
            f"{type(value).__name__}.{matrix} must have a row for each of the {rows.shape[0]} {vector}, received {shown(table)}"
        )
