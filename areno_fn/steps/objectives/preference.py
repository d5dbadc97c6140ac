"""Learning from pairs: DPO (arXiv 2305.18290), IPO (2310.12036) and the hinge of SLiC-HF (2305.10425)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F

from areno_fn.contracts.actions import Comparisons, Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.spec import PreferenceLoss
from areno_fn.steps.reduce import aggregate, count_of, divide, masked, mean_of

LOSSES: tuple[str, ...] = get_args(PreferenceLoss)


@checked
def preference(
    beta: float = 0.1, *, loss: str = "sigmoid", label_smoothing: float = 0.0
) -> Callable[[Comparisons], Sums]:
    r"""The stage `Comparisons -> Sums` of a loss over pairs, one term a pair.

    A document's implicit reward is beta times s, the sum over its answer of logp - reference ("ipo": the mean
    over its answer). With x = beta (s_chosen - s_rejected):

    | loss | of a pair |
    | --- | --- |
    | sigmoid | -(1 - e) log sigma(x) - e log sigma(-x), with e the label smoothing |
    | ipo | (x / beta - 1 / (2 beta))^2 |
    | hinge | max(0, 1 - x) |

    The mean is over pairs. Where the policy is the reference, x is exactly 0 and "sigmoid" exactly ln 2. A pair
    of which a document has no decision that counts is neither in the numerator nor in the denominator.

    Args:
        beta: how dear a distance from the reference is.
        loss: "sigmoid" (DPO), "ipo" or "hinge".
        label_smoothing: probability that a pair's labels are swapped, for "sigmoid".

    Raises:
        SpecError: there is no such loss, or a number is out of range.
    """
    _check_numbers(beta, loss, label_smoothing)

    def stage(pairs: Comparisons) -> Sums:
        if pairs.reference.requires_grad:
            raise RecordError("Comparisons.reference carries a gradient; it is data of a frozen reference")
        change = masked(pairs.logp, pairs.weight) - masked(pairs.reference, pairs.weight)
        lengths = _per_document(torch.ones_like(change), pairs)
        moved = _per_document(change, pairs)
        reward = beta * (divide(moved, lengths) if loss == "ipo" else moved)
        chosen, rejected = reward[0::2], reward[1::2]
        margin = chosen - rejected
        live = ((lengths[0::2] > 0) & (lengths[1::2] > 0)).to(margin.dtype)
        number = torch.arange(live.shape[0], device=live.device)
        terms = _terms(margin, beta, loss, label_smoothing)
        total, weight = aggregate(terms, live, number, live.shape[0], "token_mean")
        stats = {
            "dpo/accuracy": mean_of((margin > 0).to(margin.dtype), live),
            "dpo/margin": mean_of(margin, live),
            "dpo/chosen_reward": mean_of(chosen, live),
            "dpo/rejected_reward": mean_of(rejected, live),
            "entropy": mean_of(pairs.entropy, pairs.weight),
            "tokens": count_of(pairs.weight),
        }
        return Sums(total=total, weight=weight, stats=stats, peaks={})

    return stage


def _terms(margin: torch.Tensor, beta: float, loss: str, smoothing: float) -> torch.Tensor:
    if loss == "ipo":
        return (margin / beta - 1 / (2 * beta)).square()
    if loss == "hinge":
        return F.relu(1 - margin)
    right = -F.logsigmoid(margin)
    return right if smoothing == 0 else (1 - smoothing) * right - smoothing * F.logsigmoid(-margin)


def _per_document(values: torch.Tensor, pairs: Comparisons) -> torch.Tensor:
    """The weighted sum over every document, [documents]."""
    weighted = values * pairs.weight.detach().to(values.dtype)
    return values.new_zeros(pairs.documents).index_add(0, pairs.segments, weighted)


def _check_numbers(beta: float, loss: str, label_smoothing: float) -> None:
    if loss not in LOSSES:
        raise SpecError(f"preference loss {loss!r} does not exist; choose one of {', '.join(LOSSES)}")
    if not 0 < beta < math.inf:
        raise SpecError(f"preference needs a finite beta > 0, received {beta}")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss != "sigmoid"):
        raise SpecError(
            f"preference takes label_smoothing from 0 to below 0.5, and with the loss 'sigmoid' alone, "
            f"received {label_smoothing} with {loss!r}"
        )
