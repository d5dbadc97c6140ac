"""Advantages: from a reward per sample to how much better it was than expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from areno_fn.contracts.calls import checked, received
from areno_fn.contracts.errors import RecordError, RewardError, SpecError

SCALES = ("group", "batch", "none")
BASELINES = ("group", "leave_one_out", "batch")
Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rewards [B], groups int64 [B]) -> advantages [B]`, in the place of `group_advantages`."""


@checked
def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, *, baseline: str = "group", scale: str = "group", eps: float = 1e-8
) -> torch.Tensor:
    """How much better a reward is than a baseline, scaled.

        (r - baseline) / (std + eps)

    | baseline | scale | of |
    | --- | --- | --- |
    | group: the mean of the group | group | GRPO (arXiv 2402.03300) |
    | group | none | Dr. GRPO (2503.20783) |
    | leave_one_out: the mean of the others of the group | none | RLOO (2402.14740) |
    | batch: the mean of all rewards | batch | REINFORCE++ (2501.03262), a reward a sequence |

    The standard deviation is the population's (division by n), of the group or of the whole batch's rewards.
    A group of equal rewards gives exactly 0. So does a group of one, with a warning: it has nothing to be
    compared with. Permuting the rows permutes the result. Sums are taken in float64.

    Args:
        rewards: [B], finite. A completion that must not count is given weight 0 in the loss, not a NaN here.
        groups: int64 [B], rows with one number answer the same prompt; any numbers in any order.
        baseline: "group", "leave_one_out" or "batch".
        scale: "group", "batch" or "none".
        eps: added to the standard deviation, outside of its root.

    Returns:
        float32 [B] (float64 for float64 rewards).

    Raises:
        RewardError: a reward is NaN or infinite; names the row.
        RecordError: shapes or types do not fit.
        SpecError: there is no such baseline or scale, or they do not go together.
    """
    if scale not in SCALES:
        raise SpecError(f"advantage scale {scale!r} does not exist; choose one of {', '.join(SCALES)}")
    if baseline not in BASELINES:
        raise SpecError(f"advantage baseline {baseline!r} does not exist; choose one of {', '.join(BASELINES)}")
    if baseline == "batch" and scale == "group":
        raise SpecError(
            "with the baseline 'batch' use the scale 'batch' or 'none': a group of equal rewards has a deviation of 0 to divide by"
        )
    _check(rewards, groups)
    _, member, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    if baseline != "batch" and bool((counts == 1).any()):
        warnings.warn(
            f"{int((counts == 1).sum())} of {len(counts)} groups have one sample; its advantage is 0", stacklevel=2
        )
    exact = rewards.double()
    # from each group's smallest reward, so that equal rewards are zeros before anything is rounded
    lowest = exact.new_full((len(counts),), torch.inf).scatter_reduce(0, member, exact, "amin")
    above = exact - lowest[member]
    deviation = above - _group_mean(above, member, counts)[member]
    divisor = torch.ones_like(deviation)
    if scale == "group":
        divisor = (_group_mean(deviation.square(), member, counts).sqrt() + eps)[member]
    elif scale == "batch":
        divisor = divisor * (exact.std(correction=0) + eps)
    if baseline == "leave_one_out":
        deviation = deviation * (counts / (counts - 1).clamp(min=1))[member]
    elif baseline == "batch":
        above = exact - exact.min()
        deviation = above - above.mean()
    deviation = deviation / divisor
    return deviation.to(torch.promote_types(rewards.dtype, torch.float32))


def compared(
    compare: Compare | None, rewards: torch.Tensor, groups: torch.Tensor, *, baseline: str, scale: str
) -> torch.Tensor:
    """`group_advantages`, or what a function of one's own says, which is given copies.

    Raises:
        RecordError: the function returned something else than one floating number a row.
        RewardError: one of them is NaN or infinite; names the row.
    """
    if compare is None:
        return group_advantages(rewards, groups, baseline=baseline, scale=scale)
    found: object = compare(rewards.clone(), groups.clone())
    name = getattr(compare, "__name__", type(compare).__name__)
    if not isinstance(found, torch.Tensor) or found.shape != rewards.shape or not found.is_floating_point():
        raise RecordError(
            f"the advantages of {name} are {received(found)}; it must return a floating tensor [{rewards.shape[0]}], one for "
            f"each reward"
        )
    bad = (~torch.isfinite(found)).nonzero().flatten().tolist()
    if bad:
        raise RewardError(f"{name} gave row {bad[0]} the advantage {float(found[bad[0]])}; it must be finite")
    return found.detach().to(rewards.device, torch.promote_types(rewards.dtype, torch.float32))


def _group_mean(values: torch.Tensor, member: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(len(counts)).index_add(0, member, values) / counts


def _check(rewards: torch.Tensor, groups: torch.Tensor) -> None:
    if rewards.ndim != 1 or groups.shape != rewards.shape or groups.is_floating_point():
        raise RecordError(
            f"group_advantages takes rewards [B] and integer groups [B], "
            f"received {tuple(rewards.shape)} and {tuple(groups.shape)} of {groups.dtype}"
        )
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"the reward of row {bad[0]} is {float(rewards[bad[0]])} ({len(bad)} such rows); "
            f"a reward must be a finite number, and a sample that must not count gets weight 0 in the loss"
        )
