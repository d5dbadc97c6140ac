"""Losses of recorded denoising steps: Flow-GRPO, GRPO-Guard, DPPO, and distillation from a teacher's transitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Transition
from areno_fn.contracts.flow_batch import Moves
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.alive import counted_moves
from areno_fn.steps.flow.latents import live, over_latent
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.kl import bounded
from areno_fn.steps.reduce import count_of, masked, mean_of, peak_of

STEPS = "flow/steps"
SPACES = ("mean", "velocity", "gaussian")


def apart(moves: Moves, other: Transition, space: str, over: str = "mean") -> torch.Tensor:
    r"""How far the current transitions are from others, [M].

    | space | per element |
    | --- | --- |
    | mean | (mu - mu')^2 |
    | velocity | (v - v')^2 |
    | gaussian: the KL divergence | (mu - mu')^2 / (2 std^2) |

    Args:
        moves: the current ones, with gradient.
        other: of frozen parameters, data.
        space: where.
        over: "mean" or "sum" over the elements.

    Raises:
        RecordError: what is compared with carries a gradient.
    """
    first, second = (moves.now.velocity, other.velocity) if space == "velocity" else (moves.now.mean, other.mean)
    mask = moves.batch.mask
    if second.requires_grad:
        raise RecordError("a transition that is compared with carries a gradient; it is data of frozen parameters")
    square = (live(first, mask) - live(second, mask)).square()
    distance = over_latent(square, mask, over)
    return distance / (2 * moves.now.std.square()) if space == "gaussian" else distance


@checked
def flow_grpo(
    low: float = 1e-4, high: float = 1e-4, *, kl_coef: float = 0.0, kl_space: str = "velocity"
) -> Callable[[Moves], Sums]:
    """The stage `Moves -> Sums` of Flow-GRPO (arXiv 2505.05470) and, with its dynamics, DanceGRPO (2505.07818).

    It is `clipped` over denoising steps, one term a (row, step), plus kl_coef times `apart` from the reference.
    Without a KL it is `clipped` alone, which takes what `act_flow` returns.

    Args:
        low: how far the ratio may fall below 1 for a negative advantage.
        high: how far it may rise above 1 for a positive advantage.
        kl_coef: weight of the distance from the reference.
        kl_space: a row of the table of `apart`. flow_grpo's own code takes "gaussian".

    Raises:
        SpecError: a number is out of range, or there is no such space.
    """
    _check_space(kl_space, kl_coef)
    surrogate = clipped(low, high)

    def stage(moves: Moves) -> Sums:
        moves = counted_moves(moves)
        return _with_distance(surrogate(_actions(moves, "flow_grpo")), moves, kl_coef, kl_space, "flow_grpo")

    return stage


@checked
def grpo_guard(
    low: float = 1e-4,
    high: float = 1e-4,
    *,
    step_reweight: bool = False,
    kl_coef: float = 0.0,
    kl_space: str = "velocity",
) -> Callable[[Moves], Sums]:
    r"""The stage `Moves -> Sums` of GRPO-Guard (arXiv 2510.22319): a ratio that is centred and of one scale at all steps.

    With s the deviation of the step and b = mean (mu - mu_old)^2 / (2 s^2), which is what the log-ratio falls short
    of 0 on average, the ratio is exp((logp - old + b) s), and then as `clipped`.

    Args:
        low, high: bounds of the ratio, as in `clipped`.
        step_reweight: every term is divided by -dt, as the paper does and verl-omni; Flow-Factory does not.
        kl_coef, kl_space: as in `flow_grpo`.

    Raises:
        SpecError: a number is out of range, or there is no such space.
    """
    _check_space(kl_space, kl_coef)
    surrogate = clipped(low, high)

    def stage(moves: Moves) -> Sums:
        moves = counted_moves(moves)
        actions, before = _actions(moves, "grpo_guard"), _before(moves, "grpo_guard")
        std = moves.now.std.to(actions.logp.dtype)
        shortfall = apart(moves, before, "gaussian", moves.batch.process.over)
        advantage = actions.advantage
        if step_reweight:
            advantage = advantage / (moves.batch.interval.sigma - moves.batch.interval.next_sigma)
        centred = replace(actions, logp=(actions.logp + shortfall) * std, old=actions.old * std, advantage=advantage)
        return _with_distance(surrogate(centred), moves, kl_coef, kl_space, "grpo_guard")

    return stage


@checked
def dppo(
    threshold: float = 1e-6,
    *,
    space: str = "gaussian",
    kl_coef: float = 0.0,
    kl_space: str = "velocity",
) -> Callable[[Moves], Sums]:
    r"""The stage `Moves -> Sums` of Flow-DPPO (arXiv 2606.11025): no clip, but a trust region of the transitions.

    A term -A ratio counts unless the transition is `threshold` or farther `apart` from that of the policy that drew and
    the ratio has moved to where the advantage wants it: above 1 with A > 0, or below 1 with A < 0. What does not count
    is 0 in the numerator and stays in the denominator.

    Args:
        threshold: of `apart`; infinity leaves the plain policy gradient.
        space: in which space.
        kl_coef, kl_space: as in `flow_grpo`.

    Raises:
        SpecError: a number is out of range, or there is no such space.
    """
    _check_space(kl_space, kl_coef)
    _check_space(space, threshold)

    def stage(moves: Moves) -> Sums:
        moves = counted_moves(moves)
        actions = _actions(moves, "dppo")
        a = replace(
            actions,
            **{
                name: masked(getattr(actions, name), actions.weight) for name in ("logp", "old", "advantage", "entropy")
            },
        )
        distance = apart(moves, _before(moves, "dppo"), space)
        ratio = bounded(a.logp - a.old).exp()
        gone = ((ratio > 1) & (a.advantage > 0)) | ((ratio < 1) & (a.advantage < 0))
        kept = ~(gone & (distance >= threshold))
        total, weight = _mean(torch.where(kept, -a.advantage * ratio, 0.0), a)
        difference = (a.logp - a.old).abs()
        stats = {
            "policy_loss": torch.stack([total.detach(), weight]),
            "entropy": mean_of(a.entropy, a.weight),
            "ratio_mean": mean_of(ratio, a.weight),
            "logp_diff_mean": mean_of(difference, a.weight),
            STEPS: count_of(a.weight),
            "flow/kept_fraction": mean_of(kept.to(ratio.dtype), a.weight),
        }
        peaks = {"ratio_max": peak_of(ratio, a.weight), "logp_diff_max": peak_of(difference, a.weight)}
        sums = Sums(total=total, weight=weight, stats=stats, peaks=peaks)
        return _with_distance(sums, moves, kl_coef, kl_space, "dppo")

    return stage


@checked
def distilled(space: str = "velocity", *, normalised: bool = False) -> Callable[[Moves], Sums]:
    r"""The stage `Moves -> Sums` of on-policy distillation (arXiv 2605.15055): the distance from a teacher's transitions.

    `Denoising.reference` holds the teacher's. "gaussian" is the reverse KL divergence of a noisy step, in closed form;
    "mean", "velocity" and "data" (the predicted clean latent) are for steps of the ODE.

    Args:
        space: a row of the table of `apart`, or "data", sigma^2 (v - v')^2.
        normalised: divides each row's squared distance by its mean absolute distance, which is data.

    Raises:
        SpecError: there is no such space.
    """
    if space not in (*SPACES, "data"):
        raise SpecError(f"space {space!r} does not exist; choose one of {', '.join(SPACES)}, data")

    def stage(moves: Moves) -> Sums:
        moves = counted_moves(moves)
        batch, teacher = moves.batch, moves.batch.reference
        if teacher is None:
            raise RecordError("distilled needs Denoising.reference, the teacher's transitions, which is None")
        noisy = batch.old is not None
        if noisy != (space == "gaussian"):
            kind, right = ("noisy", "'gaussian'") if noisy else ("noiseless", "'mean', 'velocity' or 'data'")
            raise RecordError(f"distilled in the space {space!r} was given {kind} steps; use {right} for them")
        distance = apart(moves, teacher, "velocity" if space == "data" else space)
        scale = batch.interval.sigma if space == "data" else torch.ones_like(batch.interval.sigma)
        distance = distance * scale.square()
        if normalised:
            distance = distance / (_deviation(moves, teacher, space) * scale + 1e-8)
        distance = torch.where(batch.weight != 0, distance, 0.0)
        total, weight = (distance * batch.weight).sum(), batch.weight.sum()
        return Sums(total=total, weight=weight, stats={"flow/kl": mean_of(distance, batch.weight)}, peaks={})

    return stage


def _deviation(moves: Moves, teacher: Transition, space: str) -> torch.Tensor:
    use_velocity = space in ("velocity", "data")
    first, second = (moves.now.velocity, teacher.velocity) if use_velocity else (moves.now.mean, teacher.mean)
    mask = moves.batch.mask
    return over_latent((live(first, mask).detach() - live(second, mask)).abs(), mask)


def _with_distance(sums: Sums, moves: Moves, coefficient: float, space: str, who: str) -> Sums:
    """The sums with the distance from the reference, whose gradient reaches the current policy; what was counted are steps."""
    sums = replace(sums, stats={STEPS if name == "tokens" else name: value for name, value in sums.stats.items()})
    reference = moves.batch.reference
    if reference is None:
        if coefficient:
            raise RecordError(
                f"{who} has kl_coef={coefficient}, but Denoising.reference is None; fill it or set it to 0"
            )
        return sums
    distance = apart(moves, reference, space)
    stats = {**sums.stats, "flow/kl": mean_of(distance, moves.batch.weight)}
    if not coefficient:
        return replace(sums, stats=stats)
    total, _ = _mean(distance, _actions(moves, who))
    return replace(sums, total=sums.total + coefficient * total, stats=stats)


def _mean(values: torch.Tensor, actions: Actions) -> tuple[torch.Tensor, torch.Tensor]:
    weight = actions.weight.to(values.dtype)
    return (masked(values, weight) * weight).sum(), weight.sum()


def _actions(moves: Moves, who: str) -> Actions:
    if moves.actions is None:
        raise RecordError(f"{who} was given steps without noise, which have no log-probability")
    return moves.actions


def _before(moves: Moves, who: str) -> Transition:
    if moves.batch.before is None:
        raise RecordError(f"{who} needs Denoising.before, the transitions of the policy that drew, which is None")
    return moves.batch.before


def _check_space(space: str, number: float) -> None:
    if space not in SPACES or not number >= 0:
        raise SpecError(
            f"a distance is measured in one of {', '.join(SPACES)}, with a number >= 0, received {space!r} and {number}"
        )
