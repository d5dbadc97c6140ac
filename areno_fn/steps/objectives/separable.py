"""What losses say of themselves: that they are sums of functions of one decision each, that they have a gradient in entropies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Loss = TypeVar("Loss", bound=Callable[..., Any])


def separable(loss: Loss) -> Loss:
    """Marks a stage `record -> Sums` whose total is a sum over decisions, each term of one log-probability, one entropy and data.

    Then the slope in a log-probability or an entropy does not depend on the others, so that a head can be left behind with its
    gradient before the other log-probabilities are known (`areno_fn.steps.token.levered`). `total` may be divided by data.
    """
    setattr(loss, "separable", True)
    return loss


def is_separable(loss: Any) -> bool:
    """Whether a stage was marked."""
    return getattr(loss, "separable", False) is True


def entropic(loss: Loss) -> Loss:
    """Marks a stage `record -> Sums` whose total has a gradient in the entropies, so that the stage before it gives them one.

    A pipeline that scores without it is refused, instead of training without the bonus.
    """
    setattr(loss, "entropic", True)
    return loss


def is_entropic(stage: Any) -> bool:
    """Whether a loss was marked, or a stage that scores gives entropies a gradient."""
    return getattr(stage, "entropic", False) is True
