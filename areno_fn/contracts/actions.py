"""The currency between a modality and an algorithm: numbers per decision in, sums out."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import record, static
from areno_fn.contracts.shapes import require_scalar, require_vectors


@record
class Scores:
    """Log-probabilities of given decisions under the current parameters.

    Attributes:
        logp: float32 [M].
        weight: float32 [M], 0 where a decision does not count.
        segments: int64 [M], the document of each decision, in [0, documents).
        entropy: float32 [M], of the distribution the decision was scored under; with a gradient for a loss that asks for it.
        documents: number of documents.
    """

    logp: torch.Tensor
    weight: torch.Tensor
    segments: torch.Tensor
    entropy: torch.Tensor
    documents: int = static()

    def __check__(self) -> None:
        require_vectors(self, "logp", "weight", "segments", "entropy")


@record
class Actions:
    """Scores of decisions that a policy took, with what is known about them.

    Attributes:
        logp, weight, segments, entropy, documents: as in `Scores`.
        old: float32 [M], recorded under the behaviour policy: data, no gradient.
        advantage: float32 [M].
        reference: float32 [M] or None.
        rollout: float32 [M], recorded while sampling, where `old` was computed again under the same parameters by
            the functions that train; None where `old` is what was recorded.
    """

    logp: torch.Tensor
    weight: torch.Tensor
    segments: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    reference: torch.Tensor | None = None
    rollout: torch.Tensor | None = None
    documents: int = static()

    def __check__(self) -> None:
        require_vectors(self, "logp", "weight", "segments", "entropy", "old", "advantage", "reference", "rollout")


@record
class Comparisons:
    """Scores of pairs of documents: document 2k is preferred to document 2k + 1.

    Attributes:
        logp, weight, segments, entropy, documents: as in `Scores`; the number of documents is even.
        reference: float32 [M], under the frozen reference: data, no gradient.
    """

    logp: torch.Tensor
    weight: torch.Tensor
    segments: torch.Tensor
    entropy: torch.Tensor
    reference: torch.Tensor
    documents: int = static()

    def __check__(self) -> None:
        require_vectors(self, "logp", "weight", "segments", "entropy", "reference")
        if self.documents % 2:
            raise RecordError(f"Comparisons need an even number of documents, received {self.documents}")


@record
class Estimates:
    """What a critic says of decisions, with what it said before and what came of them.

    Attributes:
        value: float32 [M], under the current parameters.
        old: float32 [M], recorded before the update: data.
        returns: float32 [M], data.
        weight, segments, documents: as in `Scores`.
    """

    value: torch.Tensor
    old: torch.Tensor
    returns: torch.Tensor
    weight: torch.Tensor
    segments: torch.Tensor
    documents: int = static()

    def __check__(self) -> None:
        require_vectors(self, "value", "old", "returns", "weight", "segments")


@record
class Sums:
    """What every objective returns: a numerator and a denominator, never a mean.

    Attributes:
        total: float32 [], carries the gradient.
        weight: float32 [], the unit being averaged over (tokens, sequences); no gradient.
        stats: named moments that add up, divided once at the end: float32 [1] a count, [2] the numerator
            and denominator of a mean, [3] the sums of squares, of values and of weights of a deviation. A name
            with a family in front ("dpo/margin") is reported as it is, any other in the family of the step.
        peaks: named maxima, float32 [].
    """

    total: torch.Tensor
    weight: torch.Tensor
    stats: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor]

    def __check__(self) -> None:
        require_scalar(self.total, "Sums.total")
        require_scalar(self.weight, "Sums.weight")
        if self.weight.requires_grad:
            raise RecordError(
                "Sums.weight carries a gradient, which a mean would ignore; divide by data, or write .detach() behind it"
            )
        for name, peak in self.peaks.items():
            require_scalar(peak, f"Sums.peaks[{name!r}]")


Metrics = dict[str, float]
"""What a step reports, by the names of `areno_fn.contracts.metrics`."""
