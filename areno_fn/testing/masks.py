"""The law of masks: what has weight 0 does not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.batch import Experience, PackedTokens, Pairs
from areno_fn.contracts.flow_batch import Denoising, Noised
from areno_fn.contracts.flow_match import Replay
from areno_fn.contracts.record import replace
from areno_fn.testing.sizes import deviation, floating, require_finite, require_some, summed, widened

JUNK = (float("nan"), float("inf"), float("-inf"), 1e30, 0.0)
"""What is put under a mask."""

_OF_DECISIONS = ("index", "targets", "weight", "kept")


def mask_blind(loss: Callable[..., Sums], *args: Any, junk: Sequence[float] = JUNK, tolerance: float = 1e-5) -> None:
    """What has weight 0 does not exist: neither what stands there nor that it is there changes a result.

    Other numbers under weight 0 leave loss, gradient and statistics as they are, bit for bit. Without those decisions
    they are the same, within a tolerance. And where nothing counts at all, loss, gradient and denominator are 0: one
    that counts all decisions or documents there is a loss of another batch.

    It is called for a stage, from the numbers of decisions to `Sums`, or for a whole objective:

        laws.mask_blind(my_loss, actions)
        laws.mask_blind(pipeline(act(policy, sampling), my_loss), params, experience)

    Every third decision is given weight 0, beside those that have it, unless none would be left. In the first form every
    floating field is overwritten there, log-probabilities included, and the gradient is that of the log-probabilities (or
    of the values); it must be 0 under the mask. In the second the numbers of the batch and its masked targets are
    overwritten, and the gradient is that of the parameters. Of batches of latents whole rows are overwritten, states and
    conditions too. Decisions are left out of the records and batches of tokens of
    the library, and of records of one's own in the first form, if all their tensors begin with the dimension of decisions.

    Args:
        loss: `(decisions) -> Sums` or `(params, batch) -> Sums`.
        args: a record such as `Scores`, `Actions`, `Comparisons` or `Estimates`; or parameters and a batch. The last
            has a vector `weight` (a batch of the library: in its packed documents).
        junk: what is put under the mask.
        tolerance: largest deviation without the masked decisions, relative to the largest element of what is compared;
            parameters and decisions in less than float32 are taken to float32 for it.

    Raises:
        AssertionError: names what changed, and what had been put under the mask, or what is not finite.
        ValueError: there is no decision, no weight, or no junk.
    """
    require_some(len(junk), "junk is empty", "give mask_blind what it should put under the mask")
    *before, given = args
    path = "packed.weight" if isinstance(given, Experience | Pairs) else "weight"
    weight = dict(tree.leaves_with_path(given)).get(path)
    if weight is None or not weight.numel():
        raise ValueError(f"{type(given).__name__} has no decisions with a weight at {path!r}; there is nothing to mask")
    dead = _dead(weight)
    batch = _weighted(given, path, dead)
    measure = _of_params(loss, before[0]) if before else _of_decisions(loss)
    expected = measure(batch)
    require_finite(_by_name(expected))
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
    if not bool(dead.all()):
        _require_the_same_without(loss, before, batch, dead, tolerance)
    _require_nothing(measure(_weighted(given, path, torch.ones_like(dead))))


def _dead(weight: torch.Tensor) -> torch.Tensor:
    """Which decisions do not count: every third one of those that do is added, where others are left."""
    dead = (weight == 0) | (torch.arange(weight.shape[0], device=weight.device) % 3 == 0)
    return weight == 0 if bool(dead.all()) else dead


def _weighted(batch: Any, path: str, dead: torch.Tensor) -> Any:
    return tree.map_with_path(lambda at, leaf: leaf.masked_fill(dead, 0) if at == path else leaf, batch)


def _require_the_same_without(
    loss: Callable[..., Sums], before: list[Any], batch: Any, dead: torch.Tensor, tolerance: float
) -> None:
    """The sums of the decisions that count, where the others have been taken out of the batch."""
    smaller = _without(widened(batch), dead, stage=not before)
    if smaller is None:
        return
    measure = _of_params(loss, widened(before[0])) if before else _of_decisions(loss)
    expected, received = measure(widened(batch)), measure(smaller)
    if not before:
        expected["gradient"] = expected["gradient"][~dead]
    whole, without = _by_name(expected), _by_name(received)
    if whole.keys() != without.keys():
        changed = ", ".join(sorted(whole.keys() ^ without.keys()))
        raise AssertionError(f"other numbers are reported without the decisions of weight 0: {changed}")
    for name, values in whole.items():
        # a loss of terms that cancel is as exact as its terms, of which the weight says how many there are
        error = deviation(without[name], values, whole["weight"] if name == "loss" else [])
        if not error <= tolerance:
            raise AssertionError(
                f"without the decisions of weight 0 {name} changes by {error:.3g} of its size; count and average what "
                f"has a weight, as aggregate and mean_of do"
            )


def _without(batch: Any, dead: torch.Tensor, *, stage: bool) -> Any:
    """The batch without some decisions; None where it cannot be known which of its numbers belong to them."""
    tokens = isinstance(batch, PackedTokens | Experience | Pairs)
    leaves = [leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tokens and not (stage and all(leaf.shape[:1] == dead.shape for leaf in leaves)):
        return None

    def left(path: str, leaf: Any) -> Any:
        packed = isinstance(batch, PackedTokens) or path.startswith("packed.")
        if not isinstance(leaf, torch.Tensor) or (tokens and packed and path.split(".")[-1] not in _OF_DECISIONS):
            return leaf
        return leaf[~dead]

    return tree.map_with_path(left, batch)


def _require_nothing(found: dict[str, Any]) -> None:
    for name, values in _by_name({key: found[key] for key in ("loss", "weight", "gradient")}).items():
        for tensor in values:
            if bool((tensor != 0).any()):
                raise AssertionError(
                    f"where every decision has weight 0, {name} is {float(tensor[tensor != 0][0])}; a batch in which nothing "
                    f"counts gives a loss, a gradient and a weight of 0, as aggregate does"
                )


def _by_name(found: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """What was measured, as numbers by name."""
    named: dict[str, list[torch.Tensor]] = {}
    for name, value in found.items():
        if name in ("stats", "peaks"):
            named |= {f"{name}.{key}": [one] for key, one in value.items()}
        else:
            named[name] = floating(value)
    return named


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
        sums = summed(function(moved))
        return sums.total, sums

    (_, sums), slope = value_and_grad(of, has_aux=True)(at)
    return {"loss": sums.total, "weight": sums.weight, "gradient": slope, "stats": sums.stats, "peaks": sums.peaks}


def _overwritten(batch: Any, dead: torch.Tensor, value: float) -> Any:
    """The batch with other numbers and other targets under weight 0, and of latents whole rows of other numbers."""
    rows = isinstance(batch, Noised | Denoising | Replay)

    def under(path: str, leaf: Any) -> Any:
        name = path.split(".")[-1]
        if not isinstance(leaf, torch.Tensor) or name == "weight":
            return leaf
        if (leaf.shape[: dead.ndim] if rows else leaf.shape) != dead.shape:
            return leaf
        if leaf.is_floating_point():
            hidden = dead.reshape(dead.shape + (1,) * (leaf.ndim - dead.ndim))
            return torch.where(hidden, value, leaf).to(leaf.dtype)
        return torch.where(dead, 0, leaf) if name == "targets" else leaf

    return tree.map_with_path(under, batch)
