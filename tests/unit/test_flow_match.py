"""Distribution matching: replays, the noise that judges are shown, and the losses of generator and follower."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_checks import F64, agrees, rows_named
from flow_models import SHAPE, Field, parameters, prompts

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions, Process, Schedule, Trajectory
from areno_fn.contracts.flow_match import Judges, Matched, Replay
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.match import followed, match, mixed_noise, replayed
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.distribution import dmd2, rewarded_matching, trajectory_matching
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import predict
from areno_fn.steps.flow.replay import carried, replayed_once, replays
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.times import Times
from areno_fn.testing import laws

Stage = Callable[[Matched], Sums]
ROWS, POLICY, PARAMS = 5, Field(), parameters()
JUDGES = Judges(generator=PARAMS, real=parameters("real"), fake=parameters("fake"), surrogate=parameters("surrogate"))


def matched(generated: torch.Tensor, **fields: Any) -> Matched:
    rows = generated.shape[0]
    names = ("real", "fake", "plain", "surrogate")
    defaults = {name: rows_named(name, rows) for name in names} | {"weight": torch.ones(rows, dtype=F64)}
    return Matched(generated=generated, **{**defaults, "real_guidance": 4.0, **fields})


def at(stage: Stage, generated: torch.Tensor, **fields: Any) -> tuple[float, torch.Tensor]:
    point = generated.clone().requires_grad_()
    sums = stage(matched(point, **fields))
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    return (sums.total / sums.weight).item(), gradient


def trajectory(steps: int = 4, guidance: float = 1.0) -> Trajectory:
    sample = flow_sampler(POLICY, Process(dynamics="ode", guidance=guidance))
    given = prompts(ROWS, negative=True)
    return sample(PARAMS, given, Key.of(1), flow_match(steps, shift=2.0), noise_levels(steps, ()), keep=range(steps))


# ------------------------------------------------------------------------------------------ the generator's losses


def test_dmd2() -> None:
    x = rows_named("generated", ROWS)
    real, fake = rows_named("real", ROWS), rows_named("fake", ROWS)

    def plain(y: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            direction = (fake[i] - real[i]) / max(float((frozen[i] - real[i]).abs().mean()), 1e-6)
            total = total + 0.5 * ((y[i] - (frozen[i] - direction)) ** 2).mean()
        return total / ROWS

    agrees(*at(dmd2(), x), x, plain)


def test_dmd2_by_hand() -> None:
    """Generated 1, real .5, fake .8: the direction is .3 / .5 = .6, the loss .18, the gradient .6."""
    one = torch.ones(1, 1, dtype=F64)
    loss, gradient = at(dmd2(), one, real=0.5 * one, fake=0.8 * one, plain=None, surrogate=None)
    assert loss == pytest.approx(0.18, rel=1e-12) and gradient.item() == pytest.approx(0.6, rel=1e-12)


def revised(y: torch.Tensor, frozen: torch.Tensor, direction: torch.Tensor, anchor: torch.Tensor, c: float) -> Any:
    delta = y - (frozen + direction)
    bent = torch.sqrt(delta**2 + c**2) - c if c else 0.5 * delta**2
    return bent.mean() / max(float((frozen - anchor).abs().mean()), 1e-6)


@pytest.mark.parametrize("huber", [1e-3, 0.0])
def test_tdm(huber: float) -> None:
    x, real, fake = (rows_named(name, ROWS) for name in ("generated", "real", "fake"))

    def plain(y: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        return sum(revised(y[i], frozen[i], real[i] - fake[i], real[i], huber) for i in range(ROWS)) / ROWS

    agrees(*at(trajectory_matching(huber=huber), x), x, plain)


@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_tdm_r1(guidance: float) -> None:
    x, real, fake, bare, best = (rows_named(name, ROWS) for name in ("generated", "real", "fake", "plain", "surrogate"))

    def plain(y: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            total = total + revised(y[i], frozen[i], real[i] - fake[i], real[i], 1e-3)
            if guidance > 1:
                total = total + 0.3 * revised(y[i], frozen[i], 4.5 / 3 * (real[i] - bare[i]), real[i], 1e-3)
            total = total + 0.7 * revised(y[i], frozen[i], best[i] - real[i], best[i], 1e-3)
        return total / ROWS

    agrees(*at(rewarded_matching(), x, real_guidance=guidance), x, plain)


@pytest.mark.parametrize("stage", [dmd2(), trajectory_matching(), trajectory_matching(huber=0.0)])
def test_where_fake_is_real_the_generator_stays(stage: Stage) -> None:
    x = rows_named("generated", ROWS)
    loss, gradient = at(stage, x, fake=rows_named("real", ROWS))
    assert loss == 0.0 and not gradient.any()


@pytest.mark.parametrize("stage", [dmd2(), trajectory_matching(), rewarded_matching()])
def test_what_does_not_count_changes_nothing(stage: Stage) -> None:
    x = rows_named("generated", ROWS)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=F64)
    mask = torch.ones(ROWS, *SHAPE, dtype=torch.bool)
    mask[:, 0, 2] = False
    loss, gradient = at(stage, x, weight=weight, mask=mask)
    alive = mask & (weight != 0)[:, None, None]
    spoiled = {n: torch.where(alive, rows_named(n, ROWS), math.nan) for n in ("real", "fake", "plain", "surrogate")}
    again, slope = at(stage, torch.where(alive, x, math.nan), weight=weight, mask=mask, **spoiled)
    assert again == loss and torch.equal(slope, gradient)
    assert not gradient[~alive].any() and bool(gradient[alive].all())


def test_mistakes_are_refused() -> None:
    x = rows_named("generated", ROWS)
    with pytest.raises(RecordError, match=r"needs Matched.surrogate, which is None"):
        at(rewarded_matching(), x, surrogate=None)
    with pytest.raises(RecordError, match=r"needs Matched.plain for a guided teacher"):
        at(rewarded_matching(), x, plain=None)
    with pytest.raises(RecordError, match=r"Matched.real carries a gradient"):
        at(dmd2(), x, real=x.clone().requires_grad_())
    with pytest.raises(SpecError, match="huber must be finite and at least 0"):
        trajectory_matching(huber=-1.0)
    with pytest.raises(SpecError, match="0 <= mixture <= 1"):
        rewarded_matching(mixture=1.5)
    with pytest.raises(SpecError, match="query 'below' does not exist"):
        replays(trajectory(), Key.of(0), Times(), query="below")
    noisy = flow_sampler(POLICY, Process())(PARAMS, prompts(2), Key.of(1), flow_match(4), noise_levels(4, None))
    with pytest.raises(SpecError, match="on a rollout of the ODE by Euler's method, received one of 'flow_sde'"):
        replays(noisy, Key.of(0), Times())


# ------------------------------------------------------------------------------------------ replays


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_replayed_step_is_the_one_that_was_sampled(guidance: float) -> None:
    """x' = (1 - next) x0 + next x1 of the replay is the stored next state, and after the last step x0 is the sample."""
    drawn = trajectory(guidance=guidance)
    for step, batch in enumerate(replays(drawn, Key.of(0), Times())):
        clean, implied = replayed(POLICY, PARAMS, batch)
        after = drawn.schedule.sigmas[step + 1]
        assert torch.allclose((1 - after) * clean + after * implied, drawn.state(step + 1), atol=1e-5)
    assert torch.allclose(clean, drawn.final, atol=1e-6)


def test_levels_of_the_judges() -> None:
    drawn = trajectory()
    sigmas = drawn.schedule.sigmas.tolist()
    for query in ("anywhere", "interval", "above"):
        for step, batch in enumerate(replays(drawn, Key.of(7), Times(low=0.02, high=0.98), query=query)):
            low, high = {"anywhere": (0.02, 0.98), "interval": (sigmas[step + 1], sigmas[step])}.get(
                query, (sigmas[step + 1], 0.98)
            )
            assert batch.level.min() >= low - 1e-7 and batch.level.max() <= high + 1e-7
            assert batch.middle.tolist() == [0.0 if query == "anywhere" else sigmas[step + 1]] * ROWS
    assert len({x for b in replays(drawn, Key.of(7), Times()) for x in b.level.tolist()}) == 4 * ROWS


def test_mixed_noise_carries_a_state_from_one_level_to_another() -> None:
    """alpha x0 + sigma mixed is the state at `middle` scaled, plus fresh noise: variances add up to sigma^2 exactly."""
    drawn = trajectory()
    for batch in replays(drawn, Key.of(3), Times(), query="above"):
        batch = tree.map(lambda x: x.double() if x.is_floating_point() else x, batch)
        implied = rows_named("implied", ROWS)
        clean = rows_named("clean", ROWS)
        mixed = mixed_noise(implied, batch)
        level, middle = batch.level[:, None, None], batch.middle[:, None, None]
        shown = (1 - level) * clean + level * mixed
        scale = (1 - level) / (1 - middle)
        fresh = shown - scale * ((1 - middle) * clean + middle * implied)
        expected = torch.sqrt(level**2 - (scale * middle) ** 2) * batch.noise
        assert torch.allclose(fresh, expected, atol=1e-12)


def test_where_all_noise_is_fresh_the_importance_is_1() -> None:
    """T = 1 and a middle of 0: TDM's noise is DMD2's, and its follower learns plain flow matching."""
    (batch,) = replays(trajectory(1), Key.of(3), Times(), query="interval")
    assert torch.allclose(mixed_noise(rows_named("implied", ROWS).float(), batch), batch.noise, atol=1e-6)
    follower = followed(POLICY, PARAMS, batch)
    assert torch.allclose(follower.factor, torch.ones(ROWS), atol=1e-6)
    clean, _ = replayed(POLICY, PARAMS, batch)
    assert torch.allclose(follower.target, batch.noise - clean, atol=1e-5)


def test_the_follower_of_tdm() -> None:
    """importance min((1 - s)^2 / s^2, 5) MSE(x0 of the follower, x0), importance exp(clip(mean(z^2 - mixed^2) / 2, log 20))."""
    for batch in replays(trajectory(), Key.of(3), Times(), query="interval"):
        shown = followed(POLICY, PARAMS, batch)
        sums = pipeline(predict(POLICY), velocity_matching("data", snr_cap=5.0))(JUDGES.fake, shown)
        clean, implied = replayed(POLICY, PARAMS, batch)
        mixed, total = mixed_noise(implied, batch), 0.0
        for i in range(ROWS):
            s = float(batch.level[i])
            x = (1 - s) * clean[i] + s * mixed[i]
            v = POLICY.velocity(JUDGES.fake, x[None], torch.tensor([1000 * s]), batch.conditions.positive[i : i + 1])[0]
            exponent = float((batch.noise[i] ** 2 - mixed[i] ** 2).mean()) / 2
            importance = math.exp(min(max(exponent, -math.log(20)), math.log(20)))
            total += importance * min(((1 - s) / s) ** 2, 5.0) * float(((x - s * v - clean[i]) ** 2).mean())
        assert sums.total.item() == pytest.approx(total, rel=1e-4) and sums.weight.item() == ROWS


def test_judges_are_asked_about_the_noised_result() -> None:
    (batch,) = replays(trajectory(guidance=2.0), Key.of(3), Times(), steps=[1], real_guidance=4.0)
    found = match(POLICY, rewards=True)(JUDGES, batch)
    clean, _ = replayed(POLICY, PARAMS, batch)
    level = batch.level[:, None, None]
    shown = (1 - level) * clean + level * batch.noise

    def ask(params: Any, condition: torch.Tensor) -> torch.Tensor:
        return POLICY.velocity(params, shown, 1000 * batch.level, condition)

    towards, away = batch.conditions.positive, batch.conditions.negative
    guided = ask(JUDGES.real, away) + 4 * (ask(JUDGES.real, towards) - ask(JUDGES.real, away))
    led = ask(JUDGES.surrogate, away) + 4 * (ask(JUDGES.surrogate, towards) - ask(JUDGES.surrogate, away))
    assert torch.allclose(found.generated, clean, atol=1e-6)
    assert torch.allclose(found.real, shown - level * guided, atol=1e-5)
    assert torch.allclose(found.surrogate, shown - level * led, atol=1e-5)
    assert torch.allclose(found.plain, shown - level * ask(JUDGES.real, towards), atol=1e-5)
    assert torch.allclose(found.fake, shown - level * ask(JUDGES.fake, towards), atol=1e-5)
    assert match(POLICY)(JUDGES, batch).surrogate is None


# ------------------------------------------------------------------------------------------ with a policy

STAGES: dict[str, Stage] = {"dmd2": dmd2(), "tdm": trajectory_matching(), "tdm_r1": rewarded_matching()}


def rows_of(batch: Replay, rows: torch.Tensor) -> Replay:
    return tree.map(lambda x: x[rows], batch)


@pytest.mark.parametrize("name", STAGES)
def test_objectives_are_exact_under_split_and_move_the_generator_alone(name: str) -> None:
    (batch,) = replays(trajectory(), Key.of(3), Times(), steps=[1], query="interval", real_guidance=4.0)
    objective = pipeline(match(POLICY, rewards=name == "tdm_r1"), STAGES[name])
    judges = JUDGES if name == "tdm_r1" else replace(JUDGES, surrogate=None)
    laws.exact_under_split(
        objective, judges, batch, [rows_of(batch, torch.arange(2)), rows_of(batch, torch.arange(2, ROWS))]
    )
    _, slope = value_and_grad(lambda j: objective(j, batch).total)(judges)
    assert all(bool(leaf.any()) for leaf in tree.leaves(slope.generator))
    assert not any(bool(leaf.any()) for leaf in tree.leaves((slope.real, slope.fake)))
    same = replace(judges, fake=judges.real, surrogate=None)
    if name != "tdm_r1":
        (plain,) = replays(trajectory(), Key.of(3), Times(), steps=[1])
        _, still = value_and_grad(lambda j: objective(j, plain).total)(same)
        assert not any(bool(leaf.any()) for leaf in tree.leaves(still.generator))


# ------------------------------------------------------------------------------------------ one step a row, and states carried on


def test_one_step_of_every_row_is_the_one_that_was_sampled() -> None:
    """Every row has a step of its own, all steps are drawn, and the step leads to the stored next state."""
    drawn = trajectory()
    sigmas, seen = drawn.schedule.sigmas, set()
    for number in range(6):
        batch = replayed_once(drawn, Key.of(number), Times(low=0.1, high=0.9))
        clean, implied = replayed(POLICY, PARAMS, batch)
        for row, sigma in enumerate(batch.sigma.tolist()):
            step = sigmas.tolist().index(sigma)
            after = sigmas[step + 1]
            assert torch.equal(batch.state[row], drawn.state(step)[row])
            assert torch.allclose(
                (1 - after) * clean[row] + after * implied[row], drawn.state(step + 1)[row], atol=1e-5
            )
            seen.add(step)
        assert batch.middle.tolist() == [0.0] * ROWS
        assert batch.level.min() >= 0.1 and batch.level.max() <= 0.9
    assert seen == {0, 1, 2, 3}


def plain_trajectory(states: torch.Tensor, sigmas: list[float]) -> Trajectory:
    """A rollout [B, T + 1, 1] that nobody has drawn, through these levels."""
    rows, steps = states.shape[0], len(sigmas) - 1
    ids = torch.arange(rows)
    return Trajectory(
        conditions=Conditions(positive=ids),
        groups=ids // 2,
        ids=ids,
        final=states[:, -1],
        states=states,
        logp=torch.zeros(rows, 0),
        schedule=Schedule(sigmas=torch.tensor(sigmas), timesteps=1000 * torch.tensor(sigmas[:-1])),
        levels=torch.zeros(steps),
        process=Process(dynamics="ode"),
        state_map=tuple(range(steps + 1)),
        transition_map=(-1,) * steps,
    )


def test_what_is_learned_from_a_carried_state_is_the_velocity_of_the_states() -> None:
    """States N(.7, .4^2) at the level .6: at a level s above they are N(m, w), whose score -(x - m) / w gives the velocity
    (-s score - x) / (1 - s). The least squares of the targets in x are that line."""
    rows = 60_000
    states = torch.stack(
        [torch.zeros(rows, 1), 0.7 + 0.4 * rows_named("states", rows).float().reshape(rows, -1)[:, :1]], 1
    )
    drawn = plain_trajectory(states, [1.0, 0.6])
    one_level = Times(low=0.4999, high=0.8001)  # of the way from .6 to 1, up to .8
    (batch,) = carried(drawn, Key.of(1), one_level, shared=drawn.ids, advantage=torch.zeros(rows))
    s, mean, spread = 0.8, states[:, 1].mean().item(), states[:, 1].var().item()
    assert torch.allclose(batch.sigma, torch.tensor(s), atol=2e-4)
    kept = (1 - s) / (1 - 0.6)
    m, w = kept * mean, kept**2 * spread + s**2 - (kept * 0.6) ** 2
    x, y = batch.state[:, 0].double(), batch.target[:, 0].double()
    assert (x.mean().item(), x.var().item()) == (pytest.approx(m, abs=0.01), pytest.approx(w, rel=0.02))
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var()
    noise = (y - y.mean() - slope * (x - x.mean())).std().item() / (x.std().item() * math.sqrt(rows))
    assert slope.item() == pytest.approx((s / w - 1) / (1 - s), abs=5 * noise)
    assert (y.mean() - slope * x.mean()).item() == pytest.approx(-s * m / w / (1 - s), abs=5 * noise)


def test_at_the_end_of_the_path_it_is_flow_matching_and_a_group_shares_level_and_noise() -> None:
    drawn = trajectory()
    advantage = torch.linspace(-1, 1, ROWS)
    shared = torch.tensor([0, 0, 1, 1, 1])
    batches = carried(drawn, Key.of(2), Times(low=0.05, high=0.95), shared=shared, advantage=advantage)
    assert len(batches) == 4
    for step, batch in enumerate(batches):
        after = drawn.schedule.sigmas[step + 1].item()
        assert batch.sigma.min() >= after + (1 - after) * 0.05 - 1e-6 and batch.sigma.max() <= 0.95
        assert batch.sigma[0] == batch.sigma[1] and batch.sigma[2] == batch.sigma[3] == batch.sigma[4]
        assert torch.equal(batch.groups, shared) and torch.equal(batch.advantage, advantage)
        a = ((1 - batch.sigma) / (1 - after)).reshape(-1, 1, 1)
        fresh = batch.state - a * drawn.state(step + 1)
        assert torch.allclose(fresh[0], fresh[1], atol=1e-6) and not torch.allclose(fresh[0], fresh[2], atol=1e-2)
        assert bool((batch.factor <= (step + 1) / 4 + 1e-6).all())
    last = batches[-1]
    noise = (last.state - (1 - last.sigma).reshape(-1, 1, 1) * drawn.final) / last.sigma.reshape(-1, 1, 1)
    assert torch.allclose(last.target, noise - drawn.final, atol=1e-4)
    assert torch.allclose(last.factor, torch.ones(ROWS), atol=1e-5)
