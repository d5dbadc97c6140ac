"""Losses that compare samples: Diffusion-DPO over pairs; DGPO and the surrogate of TDM-R1 over groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow_batch import Noised, Velocities
from areno_fn.steps.flow.objectives.terms import (
    bounded_advantage,
    given,
    grouped_sum,
    mean_of_rows,
    seen,
    squared_error,
    summed,
)
from areno_fn.steps.objectives.kl import bounded
from areno_fn.steps.reduce import mean_of


@checked
def diffusion_dpo(beta: float = 2000.0) -> Callable[[Velocities], Sums]:
    r"""The stage `Velocities -> Sums` of Diffusion-DPO (arXiv 2311.12908), one term a pair.

    Row 2 k is preferred to row 2 k + 1; both share level and noise, and each has its own conditions. With e the mean
    squared velocity error,

        -log sigma(-beta / 2 ((e_w - e_w,ref) - (e_l - e_l,ref)))

    Where the policy is the reference it is exactly ln 2. A pair of which a row has weight 0 does not count.

    Args:
        beta: how dear a distance from the reference is.

    Raises:
        SpecError: beta is not above 0.
    """
    if not 0 < beta < math.inf:
        raise SpecError(f"diffusion_dpo needs a finite beta > 0, received {beta}")

    def stage(found: Velocities) -> Sums:
        now = seen(found, "diffusion_dpo", "reference")
        batch = now.batch
        _check_pairs(batch)
        change = _error(now.velocity, batch) - _error(given(batch.reference), batch)
        reward = -0.5 * beta * change
        margin = reward[0::2] - reward[1::2]
        alive = (batch.weight[0::2] != 0) & (batch.weight[1::2] != 0)
        weight = torch.where(alive, batch.weight[0::2], 0.0)
        losses = -F.logsigmoid(margin)
        total, count = mean_of_rows(losses if batch.factor is None else losses * batch.factor[0::2], weight)
        stats = {
            "dpo/accuracy": mean_of((margin > 0).to(margin.dtype), weight),
            "dpo/margin": mean_of(margin, weight),
            "dpo/chosen_reward": mean_of(reward[0::2], weight),
            "dpo/rejected_reward": mean_of(reward[1::2], weight),
            "flow/error": mean_of(_error(now.velocity, batch), batch.weight),
            "flow/kl": mean_of(squared_error(now.velocity, given(batch.reference), batch.mask), batch.weight),
        }
        return Sums(total=total, weight=count, stats=stats, peaks={})

    return stage


def best_and_worst(advantages: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The rows of the pairs of an online DPO: of every group the best and the worst, int64 [2 P].

    A group whose advantages are all equal makes no pair. Of equal rows the first is taken.

    Args:
        advantages: [B].
        groups: int64 [B].
    """
    pairs: list[int] = []
    for group in torch.unique(groups).tolist():
        rows = (groups == group).nonzero().flatten()
        of_group = advantages[rows]
        if bool(of_group.max() > of_group.min()):
            pairs += [int(rows[of_group.argmax()]), int(rows[of_group.argmin()])]
    return torch.tensor(pairs, dtype=torch.int64, device=groups.device)


@checked
def group_preference(
    beta: float = 100.0,
    *,
    max_advantage: float = 5.0,
    trust: float = 0.0,
    runaway: float = 0.0,
    anchor: float = 0.0,
    strict: bool = False,
    kl_coef: float = 0.0,
) -> Callable[[Velocities], Sums]:
    r"""The stage `Velocities -> Sums` of a preference of groups over groups, by advantages.

    With d the mean squared velocity error of a row and K the rows of its group g,

        S = sum over g of A beta (d - d_ref) / K,    loss of a row = sigma(S) A d,    sigma(S) data

    which is the gradient of softplus(S) up to beta / K. DGPO (arXiv 2510.08425) is this with `trust` for its clip. The
    surrogate of TDM-R1 (2603.07700) is this with beta 1 (its recipes take 10), trust 1e-3, runaway .05, anchor .001 and
    the factor k / T; published code noises the stored state of a boundary for it as if it were clean, and clean latents
    are the plain choice. At the reference sigma(S) is 1/2. All rows of a group, which share level and noise, must be in
    one micro-batch.

    Args:
        beta: scale of the preference.
        max_advantage: advantages are clipped to it.
        trust: c; a row whose exp(d_old - d) has left [1 - c, 1 + c] to where its advantage wants it has no gradient; 0 for none.
        runaway: a row that has moved to where its advantage wants it with (d - d_ref)^2 above this has no gradient
            in the preference; 0 for none.
        anchor: coefficient of (d - d_ref)^2.
        strict: the value is softplus(S) K / beta a group, of which every one must have advantages of both signs; the
            gradient is the same.
        kl_coef: weight of the squared distance from the reference's velocity.

    Raises:
        SpecError: a number is out of range.
    """
    weights = (beta, anchor, kl_coef)
    fits = beta > 0 and max_advantage > 0 and all(number >= 0 for number in (trust, runaway, anchor, kl_coef))
    if not (fits and all(map(math.isfinite, weights))):
        raise SpecError(
            "group_preference needs a finite beta > 0, max_advantage > 0, the others at least 0, anchor and kl_coef finite, "
            f"received beta={beta}, "
            f"max_advantage={max_advantage}, trust={trust}, runaway={runaway}, anchor={anchor}, kl_coef={kl_coef}"
        )

    def stage(found: Velocities) -> Sums:
        old = ("old",) if trust else ()
        now = seen(found, "group_preference", "reference", "advantage", "groups", *old)
        batch = now.batch
        advantage, groups = bounded_advantage(given(batch.advantage), max_advantage), given(batch.groups)
        error, reference = _error(now.velocity, batch), _error(given(batch.reference), batch)
        held = _held(error.detach(), reference, advantage, batch, trust, runaway)
        moving = torch.where(held, error.detach(), error)
        alive = (batch.weight != 0).to(error.dtype)
        size = grouped_sum(alive, groups)[0].clamp(min=1)
        sums, member = grouped_sum(alive * advantage * beta * (moving - reference) / size, groups)
        share = torch.sigmoid(sums).detach()
        if strict:
            _check_signs(advantage, alive, groups)
            first = _first_of_each(member, alive)  # the value stands in one row that counts of each group
            values = torch.where(first, F.softplus(sums) * size / beta, 0.0)
        else:
            values = share * advantage * moving
        values = values + anchor * (error - reference).square()
        stats = {
            "flow/group_weight": mean_of(share, batch.weight),
            "flow/kept_fraction": mean_of((~held).to(error.dtype), batch.weight),
        }
        return summed(values, batch, penalties=((kl_coef, batch.reference),), stats=stats, velocity=now.velocity)

    return stage


def _held(
    error: torch.Tensor,
    reference: torch.Tensor,
    advantage: torch.Tensor,
    batch: Noised,
    trust: float,
    runaway: float,
) -> torch.Tensor:
    """Rows that have moved far enough to where their advantage wants them, bool [M]."""
    held = torch.zeros_like(advantage, dtype=torch.bool)
    wanted = advantage > 0
    if trust:
        ratio = bounded(_error(given(batch.old), batch) - error).exp()
        held = held | torch.where(wanted, ratio > 1 + trust, ratio < 1 - trust)
    if runaway:
        moved = torch.where(wanted, error < reference, error > reference)
        held = held | (moved & ((error - reference).square() > runaway))
    return held


def _error(velocity: torch.Tensor, batch: Noised) -> torch.Tensor:
    return squared_error(velocity, batch.target, batch.mask)


def _first_of_each(member: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    places = torch.arange(member.shape[0], device=member.device)
    counted = torch.where(alive != 0, places, member.shape[0])
    count = int(member.max()) + 1 if member.numel() else 0
    first = places.new_full((count,), member.shape[0]).scatter_reduce(0, member, counted, "amin")
    return first[member] == places


def _check_pairs(batch: Noised) -> None:
    # a value cannot be looked at while a graph is traced
    odd = batch.weight.shape[0] % 2
    apart = not odd and not torch.compiler.is_compiling() and not _share_levels(batch)
    if odd or apart:
        raise RecordError(
            "diffusion_dpo takes rows in pairs, preferred first, that share their level; "
            "noise both with one number in `shared`"
        )


def _share_levels(batch: Noised) -> bool:
    alive = (batch.weight[0::2] != 0) & (batch.weight[1::2] != 0)
    return bool(((batch.sigma[0::2] == batch.sigma[1::2]) | ~alive).all())


def _check_signs(advantage: torch.Tensor, alive: torch.Tensor, groups: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    above = grouped_sum(alive * (advantage > 0), groups)[0]
    below = grouped_sum(alive * (advantage <= 0), groups)[0]
    bad = (((above == 0) | (below == 0)) & (above + below != 0)).nonzero().flatten().tolist()
    if bad:
        raise RecordError(
            f"group {int(groups[bad[0]])} has advantages of one sign only; the strict preference needs both"
        )
