"""The coefficient of a KL penalty, moved so that the KL stays near a target (arXiv 1909.08593)."""

from __future__ import annotations

from areno_fn.contracts.errors import SpecError

LARGEST_ERROR = 0.2
"""A relative error counts for no more than this."""


def adapted_kl_coef(coef: float, measured: float, *, target: float, count: int, horizon: float) -> float:
    """The next coefficient of a proportional controller.

        coef (1 + clip(measured / target - 1, -0.2, 0.2) count / horizon)

    Args:
        coef: the coefficient so far.
        measured: mean KL of the last update.
        target: what it should be, above 0.
        count: samples of that update, at most the horizon.
        horizon: samples in which a constant error of 0.2 would change the coefficient by a fifth.

    Raises:
        SpecError: a number is out of range.
    """
    if not (target > 0 and horizon > 0 and 0 <= count <= horizon and coef >= 0):
        raise SpecError(
            f"adapted_kl_coef needs coef >= 0, target > 0 and 0 <= count <= horizon, "
            f"received coef={coef}, target={target}, count={count}, horizon={horizon}"
        )
    error = min(max(measured / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * count / horizon)
