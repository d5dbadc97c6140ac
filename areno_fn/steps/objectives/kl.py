r"""Estimators of the KL divergence from a reference, per decision, on samples of the current policy.

With d = logp - reference (Schulman, "Approximating KL divergence", 2020):

    k1 = d              unbiased, signed
    k2 = d^2 / 2        biased, of low variance near 0
    k3 = e^(-d) - 1 + d unbiased, never negative; its gradient in logp is 1 - e^(-d)
    abs = |d|           a distance to report

The gradient reaches the policy through logp in every one of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.errors import SpecError
from areno_fn.steps.reduce import wide

EXPONENT_LIMIT = 20.0


def bounded(exponent: torch.Tensor) -> torch.Tensor:
    """The argument of an exponential clamped to +-20; a clamped element has gradient 0."""
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)


def k1(difference: torch.Tensor) -> torch.Tensor:
    """The difference itself, d."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """Half the square, d^2 / 2."""
    return 0.5 * difference * difference


def k3(difference: torch.Tensor) -> torch.Tensor:
    """The value e^(-d) - 1 + d, with d clamped as a whole, so that a clamped element has gradient 0."""
    difference = bounded(difference)
    return torch.expm1(-difference) + difference


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def kl(logp: torch.Tensor, reference: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """The estimate of KL(policy || reference) at every decision.

    Args:
        logp: floating [...], under the current policy.
        reference: floating [...], under the reference: data.
        estimator: a key of `ESTIMATORS`.

    Returns:
        float32 [...] (float64 for float64 arguments).

    Raises:
        SpecError: there is no such estimator.
    """
    check_estimator(estimator)
    return ESTIMATORS[estimator](wide(logp) - wide(reference))


def check_estimator(estimator: str) -> None:
    """Refuses the name of an estimator that does not exist."""
    if estimator not in ESTIMATORS:
        raise SpecError(f"KL estimator {estimator!r} does not exist; choose one of {', '.join(ESTIMATORS)}")
