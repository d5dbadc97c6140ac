"""Losses of recorded steps: Flow-GRPO, GRPO-Guard, DPPO, distillation, against formulas written plainly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_checks import F64, agrees, rows_named
from flow_models import Field, numbers, parameters, prompts

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions, Interval, Process, Transition
from areno_fn.contracts.flow_batch import Denoising, Moves
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.coupled import distilled, dppo, flow_grpo, grpo_guard
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import denoising, move, recall
from areno_fn.steps.flow.transition import log_prob, transition
from areno_fn.steps.reduce import measure
from areno_fn.testing import laws

Stage = Callable[[Moves], Sums]
ROWS = 6
POLICY, PARAMS = Field(), parameters()


def steps_of(dynamics: str = "flow_sde", **fields: Any) -> Denoising:
    """Steps at different levels, drawn under the velocity `old`."""
    sigma = torch.linspace(0.2, 0.9, ROWS, dtype=F64)
    interval = Interval(
        sigma=sigma,
        next_sigma=sigma - 0.1,
        ceiling=sigma,
        level=torch.full((ROWS,), 0.0 if dynamics == "ode" else 0.7, dtype=F64),
        timestep=1000 * sigma,
    )
    state = rows_named("state", ROWS)
    before = transition(state, rows_named("old", ROWS), interval, dynamics)  # type: ignore[arg-type]
    taken = before.mean + before.std[:, None, None] * rows_named("z", ROWS)
    reference = transition(state, rows_named("reference", ROWS), interval, dynamics)  # type: ignore[arg-type]
    defaults = {
        "state": state,
        "taken": taken,
        "interval": interval,
        "conditions": Conditions(positive=numbers("condition", ROWS, 4, dtype=F64)),
        "old": None if dynamics == "ode" else log_prob(before, taken),
        "advantage": numbers("advantage", ROWS, dtype=F64),
        "weight": torch.ones(ROWS, dtype=F64),
        "segments": torch.arange(ROWS),
        "before": before,
        "reference": reference,
        "documents": ROWS,
        "process": Process(dynamics=dynamics),  # type: ignore[arg-type]
    }
    return Denoising(**{**defaults, **fields})


def moves_at(batch: Denoising, velocity: torch.Tensor) -> Moves:
    now = transition(batch.state, velocity, batch.interval, batch.process.dynamics)
    if batch.old is None:
        return Moves(now=now, actions=None, batch=batch)
    actions = Actions(
        logp=log_prob(now, batch.taken),
        weight=batch.weight,
        segments=batch.segments,
        entropy=torch.zeros_like(batch.weight),
        old=batch.old,
        advantage=batch.advantage,
        documents=batch.documents,
    )
    return Moves(now=now, actions=actions, batch=batch)


def at(stage: Stage, batch: Denoising, velocity: torch.Tensor) -> tuple[float, torch.Tensor, Sums]:
    point = velocity.clone().requires_grad_()
    sums = stage(moves_at(batch, point))
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    return (sums.total / sums.weight).item(), gradient, sums


def mean_and_std(batch: Denoising, v: torch.Tensor, i: int) -> tuple[torch.Tensor, float]:
    """Flow-SDE as flow_grpo writes it, for one row."""
    s, dt = float(batch.interval.sigma[i]), -0.1
    g = 0.7 * math.sqrt(s / (1 - s))
    x = batch.state[i]
    mean = x * (1 + g**2 / (2 * s) * dt) + v[i] * (1 + g**2 * (1 - s) / (2 * s)) * dt
    return mean, g * math.sqrt(-dt)


def logp_of(batch: Denoising, v: torch.Tensor, i: int) -> torch.Tensor:
    mean, std = mean_and_std(batch, v, i)
    return (-((batch.taken[i] - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).mean()


def near_old(share: float = 0.02) -> torch.Tensor:
    return (1 - share) * rows_named("old", ROWS) + share * rows_named("v", ROWS)


def clip_loss(ratio: torch.Tensor, a: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))


@pytest.mark.parametrize("space", ["mean", "velocity", "gaussian"])
def test_flow_grpo(space: Any) -> None:
    batch, v = steps_of(), near_old(0.3)

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            ratio = torch.exp(logp_of(batch, x, i) - batch.old[i])
            total = total + clip_loss(ratio, batch.advantage[i], 0.05, 0.1)
            (mean, std), (other, _) = mean_and_std(batch, x, i), mean_and_std(batch, rows_named("reference", ROWS), i)
            distance = ((mean - other) ** 2).mean() / (2 * std**2 if space == "gaussian" else 1)
            if space == "velocity":
                distance = ((x[i] - rows_named("reference", ROWS)[i]) ** 2).mean()
            total = total + 0.04 * distance
        return total / ROWS

    agrees(*at(flow_grpo(0.05, 0.1, kl_coef=0.04, kl_space=space), batch, v)[:2], v, plain)


@pytest.mark.parametrize("reweight", [False, True])
def test_grpo_guard(reweight: bool) -> None:
    batch, v = steps_of(), near_old(0.3)

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            (mean, std), (old, _) = mean_and_std(batch, x, i), mean_and_std(batch, rows_named("old", ROWS), i)
            exponent = (logp_of(batch, x, i) - batch.old[i]) * std + ((mean - old) ** 2).mean() / (2 * std)
            term = clip_loss(torch.exp(exponent), batch.advantage[i], 0.01, 0.02)
            total = total + (term / 0.1 if reweight else term)
        return total / ROWS

    agrees(*at(grpo_guard(0.01, 0.02, step_reweight=reweight), batch, v)[:2], v, plain)


@pytest.mark.parametrize("space", ["gaussian", "velocity", "mean"])
def test_dppo(space: Any) -> None:
    batch, v = steps_of(), near_old(0.1)
    risen = torch.stack([logp_of(batch, v, i) - batch.old[i] for i in range(ROWS)]).sign()
    wanted = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0], dtype=F64)
    batch = replace(batch, advantage=risen * wanted * batch.advantage.abs())
    distances = []
    for i in range(ROWS):
        (mean, std), (old, _) = mean_and_std(batch, v, i), mean_and_std(batch, rows_named("old", ROWS), i)
        inner = {"velocity": v[i] - rows_named("old", ROWS)[i]}.get(space, mean - old)
        distances.append(float((inner**2).mean()) / (2 * std**2 if space == "gaussian" else 1))
    threshold = sorted(distances[:4])[2]

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            a, ratio = batch.advantage[i], torch.exp(logp_of(batch, x, i) - batch.old[i])
            held = torch.exp(logp_of(batch, frozen, i) - batch.old[i])
            gone = (held > 1 and a > 0) or (held < 1 and a < 0)
            if not (gone and distances[i] >= threshold * (1 - 1e-12)):
                total = total - a * ratio
        return total / ROWS

    loss, gradient, sums = at(dppo(threshold * (1 - 1e-12), space=space), batch, v)
    agrees(loss, gradient, v, plain)
    assert measure(sums)["flow/kept_fraction"].item() == pytest.approx(4 / 6)


def test_R7_guard_and_grpo_by_hand() -> None:
    """One element, dance_sde, level .7, dt -.04: std .14. mu_old 0, mu .028, x' .14, A 1.

    logp - old = (.14^2 - .112^2) / (2 .14^2) = .18; b = .028^2 / (2 .14^2) = .02; guard's ratio exp(.2 .14) = 1.02840.
    """
    one = torch.ones(1, dtype=F64)
    interval = Interval(sigma=0.5 * one, next_sigma=0.46 * one, ceiling=0.5 * one, level=0.7 * one, timestep=500 * one)
    state = torch.zeros(1, 1, dtype=F64)
    unit = transition(state, torch.ones(1, 1, dtype=F64), interval, "dance_sde").mean.item()
    before = transition(state, torch.zeros(1, 1, dtype=F64), interval, "dance_sde")
    taken = torch.full((1, 1), 0.14, dtype=F64)
    batch = Denoising(
        state=state, taken=taken, interval=interval, conditions=Conditions(positive=state), old=log_prob(before, taken),
        advantage=one, weight=one, segments=torch.zeros(1, dtype=torch.int64), before=before, reference=before,
        documents=1, process=Process(dynamics="dance_sde"),
    )  # fmt: skip
    v = torch.full((1, 1), 0.028 / unit, dtype=F64)
    assert before.mean.item() == 0.0 and before.std.item() == pytest.approx(0.14, rel=1e-12)
    assert at(flow_grpo(0.5, 0.5), batch, v)[0] == pytest.approx(-math.exp(0.18), rel=1e-10)
    assert at(grpo_guard(0.5, 0.5), batch, v)[0] == pytest.approx(-math.exp(0.028), rel=1e-10)
    assert at(flow_grpo(0.5, 0.5, kl_coef=1.0, kl_space="gaussian"), batch, v)[0] == pytest.approx(
        -math.exp(0.18) + 0.02, rel=1e-10
    )


def test_R8_the_clip_is_a_distance_from_1() -> None:
    """A range of 1e-4 clamps to [.9999, 1.0001], whatever kind of sequence it was read from."""
    batch, v = steps_of(advantage=torch.ones(ROWS, dtype=F64)), near_old(0.5)
    ratios = torch.exp(torch.stack([logp_of(batch, v, i) - batch.old[i] for i in range(ROWS)]))
    assert ratios.min() < 0.9999 and ratios.max() > 1.0001
    expected = -torch.minimum(ratios, ratios.clamp(0.9999, 1.0001)).mean().item()
    assert at(flow_grpo(*[1e-4, 1e-4]), batch, v)[0] == pytest.approx(expected, rel=1e-12)
    assert at(flow_grpo(*(1e-4, 1e-4)), batch, v)[0] == pytest.approx(expected, rel=1e-12)


def test_interpolations() -> None:
    """Without bounds, GRPO is DPPO without a threshold; Guard is GRPO where deviations are 1 and means have not moved."""
    batch, v = steps_of(), near_old(0.2)
    free = at(dppo(math.inf), batch, v)
    wide = at(flow_grpo(1.0, 1e9), batch, v)
    ratios = torch.exp(torch.stack([logp_of(batch, v, i) - batch.old[i] for i in range(ROWS)]))
    assert free[0] == pytest.approx(-(ratios * batch.advantage).mean().item(), rel=1e-12)
    assert wide[0] == pytest.approx(free[0], rel=1e-12) and torch.allclose(wide[1], free[1], atol=1e-14)
    moves = moves_at(batch, v)
    unit = Transition(mean=moves.now.mean, std=torch.ones(ROWS, dtype=F64), velocity=v, dynamics="flow_sde")
    still = replace(moves, now=unit, batch=replace(batch, before=unit))
    assert grpo_guard(0.1, 0.1)(still).total.item() == pytest.approx(flow_grpo(0.1, 0.1)(still).total.item(), rel=1e-12)


@pytest.mark.parametrize("stage", [flow_grpo(kl_coef=1.0), grpo_guard(kl_coef=1.0), dppo(kl_coef=1.0)])
def test_at_the_start_ratios_are_1_and_the_gradient_is_that_of_the_log_probability(stage: Stage) -> None:
    v = rows_named("old", ROWS)
    batch = steps_of()
    batch = replace(batch, reference=batch.before)
    loss, gradient, sums = at(stage, batch, v)
    found = measure(sums)
    assert found["ratio_mean"].item() == found["ratio_max"].item() == 1.0
    assert found["flow/kl"].item() == 0.0 and loss == pytest.approx(-batch.advantage.mean().item(), rel=1e-12)
    point = v.clone().requires_grad_()
    scale = batch.before.std if stage.__qualname__.startswith("grpo_guard") else torch.ones(ROWS, dtype=F64)
    logp = torch.stack([logp_of(batch, point, i) for i in range(ROWS)])
    (expected,) = torch.autograd.grad(-(batch.advantage * scale * logp).mean(), point)
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("space", ["mean", "velocity", "gaussian"])
def test_L22_the_distance_from_the_reference_has_a_gradient(space: Any) -> None:
    batch = steps_of(advantage=torch.zeros(ROWS, dtype=F64))
    start = at(flow_grpo(kl_coef=1.0, kl_space=space), batch, rows_named("reference", ROWS))
    away = at(flow_grpo(kl_coef=1.0, kl_space=space), batch, rows_named("reference", ROWS) + 0.1)
    assert start[0] == 0.0 and not start[1].any()
    assert away[0] > 0 and (away[1] > 0).all()


def test_without_advantage_there_is_no_gradient() -> None:
    batch = steps_of(advantage=torch.zeros(ROWS, dtype=F64))
    for stage in (flow_grpo(), grpo_guard(), dppo()):
        assert not at(stage, batch, near_old(0.3))[1].any()


@pytest.mark.parametrize("stage", [flow_grpo(), grpo_guard(), dppo()])
def test_a_higher_advantage_makes_a_step_likelier(stage: Stage) -> None:
    batch, v = steps_of(), rows_named("old", ROWS)
    changes = []
    for advantage in (-2.0, -0.5, 0.5, 2.0):
        given = batch.advantage.clone()
        given[2] = advantage
        _, gradient, _ = at(stage, replace(batch, advantage=given), v)
        changes.append(float(logp_of(batch, v - 1e-3 * gradient, 2) - logp_of(batch, v, 2)))
    assert changes[0] < changes[1] < changes[2] < changes[3]


# ------------------------------------------------------------------------------------------ distillation


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("space", ["gaussian", "mean", "velocity", "data"])
def test_distillation(space: str, normalised: bool) -> None:
    batch, v = steps_of("flow_sde" if space == "gaussian" else "ode"), rows_named("v", ROWS)
    teacher = rows_named("reference", ROWS)

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            s = float(batch.interval.sigma[i])
            scale, norm = {"gaussian": (0.0, 1.0), "mean": (-0.1, 1.0), "velocity": (1.0, 1.0), "data": (s, 1.0)}[space]
            if space == "gaussian":
                g = 0.7 * math.sqrt(s / (1 - s))
                scale, norm = (1 + g**2 * (1 - s) / (2 * s)) * 0.1, 2 * g**2 * 0.1
            d, held = scale * (x[i] - teacher[i]), scale * (frozen[i] - teacher[i])
            total = total + (d**2).mean() / norm / (float(held.abs().mean()) + 1e-8 if normalised else 1.0)
        return total / ROWS

    agrees(*at(distilled(space, normalised=normalised), batch, v)[:2], v, plain)
    loss, gradient, _ = at(distilled(space), batch, teacher)
    assert loss == 0.0 and not gradient.any()


def test_distillation_refuses_steps_of_the_other_kind() -> None:
    with pytest.raises(RecordError, match="in the space 'velocity' was given noisy steps; use 'gaussian'"):
        at(distilled(), steps_of(), near_old())
    with pytest.raises(RecordError, match="in the space 'gaussian' was given noiseless steps"):
        at(distilled("gaussian"), steps_of("ode"), near_old())
    with pytest.raises(RecordError, match="the teacher's transitions, which is None"):
        at(distilled(), steps_of("ode", reference=None), near_old())
    with pytest.raises(SpecError, match="space 'x' does not exist"):
        distilled("x")


# ------------------------------------------------------------------------------------------ with a policy


def drawn(dynamics: Any, guidance: float = 1.0) -> tuple[Denoising, ...]:
    process, levels = Process(dynamics=dynamics, guidance=guidance), noise_levels(5, () if dynamics == "ode" else None)
    rollout = flow_sampler(POLICY, process)
    trajectory = rollout(
        PARAMS, prompts(3, negative=guidance > 1), Key.of(2), flow_match(5), levels, samples=2, keep=[1]
    )
    advantages = numbers("advantage", 6)
    reference = parameters("reference")
    return tuple(
        recall(POLICY, b, before=PARAMS, reference=reference)
        for micro in (None, 2)
        for b in denoising(trajectory, advantages, steps=[1], micro=micro)
    )


STAGES: dict[str, tuple[str, Stage]] = {
    "grpo": ("flow_sde", flow_grpo(0.2, 0.2, kl_coef=0.1, kl_space="gaussian")),
    "dance": ("dance_sde", flow_grpo(0.2, 0.2, kl_coef=0.1, kl_space="mean")),
    "guard": ("cps", grpo_guard(0.2, 0.2, step_reweight=True, kl_coef=0.1)),
    "dppo": ("flow_sde", dppo(kl_coef=0.1)),
    "distilled": ("flow_sde", distilled("gaussian")),
    "distilled_ode": ("ode", distilled("data")),
}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_objectives_are_exact_under_split_and_differentiable(name: str, guidance: float) -> None:
    dynamics, stage = STAGES[name]
    whole, *parts = drawn(dynamics, guidance)
    objective = pipeline(move(POLICY), stage)
    params = tree.map(lambda x: x * 1.01, PARAMS)
    laws.exact_under_split(objective, params, whole, parts)
    laws.gradient(objective, params, whole)


def test_nothing_of_the_frozen_is_differentiated() -> None:
    whole = drawn("flow_sde")[0]
    _, slope = value_and_grad(lambda p: pipeline(move(POLICY), flow_grpo(kl_coef=1.0))(p, whole).total)(PARAMS)
    assert all(bool(leaf.any()) for leaf in tree.leaves(slope))
    assert not whole.before.mean.requires_grad and not whole.reference.mean.requires_grad


def test_what_a_loss_needs_must_be_there() -> None:
    batch = steps_of(before=None, reference=None)
    with pytest.raises(RecordError, match="grpo_guard needs Denoising.before"):
        at(grpo_guard(), batch, near_old())
    with pytest.raises(RecordError, match="dppo needs Denoising.before"):
        at(dppo(), batch, near_old())
    with pytest.raises(RecordError, match=r"flow_grpo has kl_coef=0.1, but Denoising.reference is None"):
        at(flow_grpo(kl_coef=0.1), batch, near_old())
    with pytest.raises(RecordError, match="flow_grpo was given steps without noise"):
        at(flow_grpo(), steps_of("ode"), near_old())
    alive = rows_named("reference", ROWS).requires_grad_()
    moving = transition(batch.state, alive, batch.interval, "flow_sde")
    for stage in (flow_grpo(kl_coef=0.1), distilled("gaussian")):
        with pytest.raises(RecordError, match="a transition that is compared with carries a gradient"):
            at(stage, steps_of(reference=moving), near_old())
    with pytest.raises(SpecError, match="a distance is measured in one of mean, velocity, gaussian"):
        flow_grpo(kl_space="latent")
    with pytest.raises(SpecError, match="with a number >= 0"):
        dppo(-1.0)
