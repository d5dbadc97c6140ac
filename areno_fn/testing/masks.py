"""The law of masks: what has weight 0 does not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.batch import Experience, Pairs
from areno_fn.contracts.record import replace

JUNK = (float("nan"), float("inf"), float("-inf"), 1e30, 0.0)
"""What is put under a mask."""


def mask_blind(loss: Callable[..., Sums], *args: Any, junk: Sequence[float] = JUNK) -> None:
    """What stands under weight 0 changes neither the loss nor the gradient nor a statistic, bit for bit.

    It is called for a stage, from the numbers of decisions to `Sums`, or for a whole objective:

        laws.mask_blind(my_loss, actions)
        laws.mask_blind(pipeline(act(policy, sampling), my_loss), params, experience)

    Every third decision is given weight 0, beside those that have it. In the first form every floating field is
    overwritten there, log-probabilities included, and the gradient is that of the log-probabilities (or of the values);
    it must be 0 under the mask. In the second the numbers of the batch and its masked targets are overwritten, and the
    gradient is that of the parameters.

    Args:
        loss: `(decisions) -> Sums` or `(params, batch) -> Sums`.
        args: a record such as `Scores`, `Actions`, `Comparisons` or `Estimates`; or parameters and a batch. The last
            has a vector `weight` (a batch of the library: in its packed documents).
        junk: what is put under the mask.

    Raises:
        AssertionError: names what changed, and what had been put under the mask.
        ValueError: there is no decision, or no weight.
    """
    *before, given = args
    path = "packed.weight" if isinstance(given, Experience | Pairs) else "weight"
    weight = dict(tree.leaves_with_path(given)).get(path)
    if weight is None or not weight.numel():
        raise ValueError(f"{type(given).__name__} has no decisions with a weight at {path!r}; there is nothing to mask")
    dead = (weight == 0) | (torch.arange(weight.shape[0], device=weight.device) % 3 == 0)
    batch = tree.map_with_path(lambda at, leaf: leaf.masked_fill(dead, 0) if at == path else leaf, given)
    measure = _of_params(loss, before[0]) if before else _of_decisions(loss)
    expected = measure(batch)
    if not before:
        _require_none(expected["gradient"], dead)
    for value in junk:
        received = measure(_overwritten(batch, dead, value))
        difference = tree.first_difference(expected, received)
        if difference is not None:
            raise AssertionError(
                f"{value} under weight 0 changes {difference}; select what counts (torch.where) before any arithmetic, "
                f"since 0 times NaN is NaN"
            )


def _of_params(loss: Callable[..., Sums], params: Any) -> Callable[[Any], dict[str, Any]]:
    def measure(batch: Any) -> dict[str, Any]:
        return _measured(lambda moved: loss(moved, batch), params)

    return measure


def _of_decisions(loss: Callable[..., Sums]) -> Callable[[Any], dict[str, Any]]:
    def measure(decisions: Any) -> dict[str, Any]:
        name = "value" if hasattr(decisions, "value") else "logp"
        return _measured(lambda moved: loss(replace(decisions, **{name: moved})), getattr(decisions, name))

    return measure


def _require_none(gradient: torch.Tensor, dead: torch.Tensor) -> None:
    for place in (dead & (gradient != 0)).nonzero().flatten().tolist():
        raise AssertionError(
            f"decision {place} has weight 0, but its gradient is {float(gradient[place])}; leave it out of every term"
        )


def _measured(function: Callable[[Any], Sums], at: Any) -> dict[str, Any]:
    def of(moved: Any) -> tuple[torch.Tensor, Sums]:
        sums = function(moved)
        return sums.total, sums

    (_, sums), slope = value_and_grad(of, has_aux=True)(at)
    return {"loss": sums.total, "weight": sums.weight, "gradient": slope, "stats": sums.stats, "peaks": sums.peaks}


def _overwritten(batch: Any, dead: torch.Tensor, value: float) -> Any:
    """The batch with other numbers and other targets under weight 0."""

    def under(path: str, leaf: Any) -> Any:
        name = path.split(".")[-1]
        if not isinstance(leaf, torch.Tensor) or leaf.shape != dead.shape or name == "weight":
            return leaf
        if leaf.is_floating_point():
            return torch.where(dead, value, leaf).to(leaf.dtype)
        return torch.where(dead, 0, leaf) if name == "targets" else leaf

    return tree.map_with_path(under, batch)
