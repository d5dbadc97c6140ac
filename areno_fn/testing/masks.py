"""The law of masks: what has weight 0 does not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.record import replace
from areno_fn.testing.rows import packed_of

JUNK = (float("nan"), float("inf"), float("-inf"), 1e30, 0.0)
"""What is put under a mask."""


def mask_blind(loss: Callable[..., Sums], *args: Any, junk: Sequence[float] = JUNK) -> None:
    """What stands under weight 0 changes neither the loss nor the gradient nor a statistic, bit for bit.

    It is called for a stage, from the numbers of decisions to `Sums`, or for a whole objective:

        laws.mask_blind(my_loss, actions)
        laws.mask_blind(pipeline(act(policy, sampling), my_loss), params, experience)

    In the first form every floating field is overwritten where the weight is 0, log-probabilities included, and the
    gradient is that of the log-probabilities (or of the values); it must be 0 under the mask. In the second the numbers
    of the batch and its masked targets are overwritten, and the gradient is that of the parameters.

    Args:
        loss: `(decisions) -> Sums` or `(params, batch) -> Sums`.
        args: a record such as `Scores`, `Actions`, `Comparisons` or `Estimates`; or parameters and a batch. The last
            has a field `weight` (a batch of the library: in its packed documents), with zeros among others.
        junk: what is put under the mask.

    Raises:
        AssertionError: names what changed, and what had been put under the mask.
        ValueError: nothing is masked, or everything.
    """
    *before, batch = args
    weight = _weight(batch)
    dead = weight == 0
    if not 0 < int(dead.sum()) < dead.numel():
        raise ValueError(f"{int(dead.sum())} of {dead.numel()} decisions have weight 0; give some, and not all")
    measure = _of_params(loss, before[0]) if before else _of_decisions(loss, dead)
    expected = measure(batch)
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


def _of_decisions(loss: Callable[..., Sums], dead: torch.Tensor) -> Callable[[Any], dict[str, Any]]:
    def measure(decisions: Any) -> dict[str, Any]:
        name = "value" if hasattr(decisions, "value") else "logp"
        found = _measured(lambda moved: loss(replace(decisions, **{name: moved})), getattr(decisions, name))
        under = found["gradient"][dead]
        if bool((under != 0).any()):
            raise AssertionError(
                f"the gradient of {name} is {float(under[under != 0][0])} at a decision of weight 0; it must be 0 there"
            )
        return found

    return measure


def _measured(function: Callable[[Any], Sums], at: Any) -> dict[str, Any]:
    def of(moved: Any) -> tuple[torch.Tensor, Sums]:
        sums = function(moved)
        return sums.total, sums

    (_, sums), slope = value_and_grad(of, has_aux=True)(at)
    return {"loss": sums.total, "weight": sums.weight, "gradient": slope, "stats": sums.stats, "peaks": sums.peaks}


def _weight(batch: Any) -> torch.Tensor:
    packed = packed_of(batch)
    weight: torch.Tensor = (batch if packed is None else packed).weight
    return weight


def _overwritten(batch: Any, dead: torch.Tensor, value: float) -> Any:
    """The batch with other numbers under weight 0."""
    packed = packed_of(batch)
    # a truncated distribution has no probability for a token that it does not keep
    targets = "packed.targets" if packed is not batch else "targets"
    exchange = packed is not None and packed.kept is None

    def under(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.shape != dead.shape or path.split(".")[-1] == "weight":
            return leaf
        if leaf.is_floating_point():
            return torch.where(dead, value, leaf).to(leaf.dtype)
        return torch.where(dead, 0, leaf) if exchange and path == targets else leaf

    return tree.map_with_path(under, batch)
