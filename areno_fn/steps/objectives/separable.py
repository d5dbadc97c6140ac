"""Losses that are sums of functions of one log-probability each, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Loss = TypeVar("Loss", bound=Callable[..., Any])


def separable(loss: Loss) -> Loss:
    """Marks a stage `record -> Sums` whose total is a sum over decisions, each term of one log-probability and of data.

    Then the slope in a log-probability does not depend on the others, so that a head can be left behind with its
    gradient before the other log-probabilities are known (`areno_fn.steps.token.levered`). `total` may be divided by data.
    """
    setattr(loss, "separable", True)
    return loss


def is_separable(loss: Any) -> bool:
    """Whether a stage was marked."""
    return getattr(loss, "separable", False) is True
