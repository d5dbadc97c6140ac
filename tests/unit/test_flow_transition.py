"""One denoising step of four dynamics, against the published expanded forms, statistics and hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from flow_models import numbers

from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Interval, Process, Transition
from areno_fn.contracts.key import Key
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.schedule import flow_match, intervals
from areno_fn.steps.flow.transition import draw, entropy, log_prob, transition

F64 = torch.float64
NOISY = ("flow_sde", "dance_sde", "cps")


def interval(sigma: float, after: float, level: float, ceiling: float | None = None, rows: int = 1) -> Interval:
    def full(value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=F64)

    return Interval(
        sigma=full(sigma),
        next_sigma=full(after),
        ceiling=full(sigma if ceiling is None else ceiling),
        level=full(level),
        timestep=full(1000 * sigma),
    )


def test_flow_sde_is_the_expanded_form_of_flow_grpo() -> None:
    """flow_grpo writes x (1 + s^2 / (2 sigma) dt) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt, s = eta sqrt(sigma / (1 - sigma))."""
    x, v = numbers("x", 2, 5, dtype=F64), numbers("v", 2, 5, dtype=F64)
    for sigma, after, eta in [(0.8, 0.7, 0.7), (0.3, 0.05, 1.2), (0.05, 0.0, 0.3)]:
        s, dt = eta * math.sqrt(sigma / (1 - sigma)), after - sigma
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        now = transition(x, v, interval(sigma, after, eta, rows=2), "flow_sde")
        assert torch.allclose(now.mean, mean, atol=1e-14, rtol=0)
        assert now.std.tolist() == pytest.approx([s * math.sqrt(-dt)] * 2, rel=1e-14)


def test_dance_sde_is_the_expanded_form_of_dance_grpo() -> None:
    """DanceGRPO adds the score correction -eta^2 / 2 * score to the velocity, score = -(x - (1 - sigma) x0) / sigma^2."""
    x, v = numbers("x", 2, 5, dtype=F64), numbers("v", 2, 5, dtype=F64)
    for sigma, after, eta in [(0.8, 0.7, 0.7), (0.3, 0.05, 0.4)]:
        dt = after - sigma
        score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
        mean = x + v * dt + (-0.5 * eta**2 * score) * dt
        now = transition(x, v, interval(sigma, after, eta, rows=2), "dance_sde")
        assert torch.allclose(now.mean, mean, atol=1e-14, rtol=0)
        assert now.std.tolist() == pytest.approx([eta * math.sqrt(-dt)] * 2, rel=1e-14)


def test_cps_keeps_the_energy_of_the_noise() -> None:
    """With x0 = 0 and v = noise, the mean is sqrt(next^2 - std^2) noise, so that both parts have energy next^2."""
    noise = numbers("noise", 1, 7, dtype=F64)
    for eta in (0.2, 0.7, 1.0):
        now = transition(0.6 * noise, noise, interval(0.6, 0.5, eta), "cps")
        kept = (now.mean / noise).square()
        assert now.std.item() == pytest.approx(0.5 * math.sin(eta * math.pi / 2), rel=1e-14)
        assert torch.allclose(kept + now.std.square(), torch.tensor(0.25, dtype=F64), atol=1e-14)


def test_at_sigma_one_flow_sde_divides_by_the_second_level() -> None:
    """Levels 1, .75, ...: g = .7 sqrt(1 / .25) = 1.4, std = 1.4 * .5 = .7."""
    schedule = flow_match(4)
    at = intervals(schedule, torch.full((4,), 0.7), torch.tensor([0, 1]))
    now = transition(torch.ones(2, 3), torch.ones(2, 3), at, "flow_sde")
    assert at.ceiling.tolist() == [0.75, 0.75] and at.sigma.tolist() == [1.0, 0.75]
    assert now.std.tolist() == pytest.approx([0.7, 0.7 * math.sqrt(3) * 0.5], rel=1e-6)
    assert now.mean.isfinite().all()


@pytest.mark.parametrize("dynamics", NOISY)
def test_without_noise_every_dynamics_is_the_ode(dynamics: str) -> None:
    x, v = numbers("x", 3, 4), numbers("v", 3, 4)
    levels = flow_match(6, shift=3.0)
    for step in range(6):
        at = intervals(levels, torch.zeros(6), torch.full((3,), step))
        assert torch.equal(transition(x, v, at, dynamics).mean, transition(x, v, at, "ode").mean)
        assert transition(x, v, at, dynamics).std.tolist() == [0.0] * 3
    straight = transition(x.double(), v.double(), interval(0.8, 0.7, 0.0, rows=3), "ode").mean
    errors = []
    for eta in (1e-2, 1e-3, 1e-4):
        now = transition(x.double(), v.double(), interval(0.8, 0.7, eta, rows=3), dynamics)
        errors.append(float((now.mean - straight).abs().max()))
        assert now.std.max() < 2 * eta
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-7


@pytest.mark.parametrize("dynamics", NOISY)
def test_a_step_keeps_the_distribution_of_pure_noise(dynamics: str) -> None:
    """Data that is 0 makes x = sigma eps and v = eps; the next state must have variance next^2 as dt goes to 0."""
    sigma, after = 0.6, 0.599
    now = transition(
        torch.full((1, 1), sigma, dtype=F64), torch.ones(1, 1, dtype=F64), interval(sigma, after, 0.7), dynamics
    )
    assert ((now.mean.square() + now.std.square()) / after**2).item() == pytest.approx(1.0, abs=5e-6)


@pytest.mark.parametrize("dynamics", NOISY)
def test_mean_and_variance_of_100_000_draws(dynamics: str) -> None:
    count = 100_000
    x, v = torch.full((count, 1), 0.4), torch.full((count, 1), -0.9)
    schedule = flow_match(5, shift=3.0)
    at = intervals(schedule, torch.full((5,), 0.7), torch.full((count,), 2))
    now = transition(x, v, at, dynamics)
    noise = latent_noise(Key.of(3), torch.arange(count), (1,), 2)
    drawn = draw(now, noise, torch.float32).double().flatten()
    sigma, after = float(at.sigma[0]), float(at.next_sigma[0])
    dt, x0, x1 = after - sigma, 0.4 + 0.9 * sigma, 0.4 - 0.9 * (1 - sigma)
    if dynamics == "cps":
        std = after * math.sin(0.35 * math.pi)
        mean = (1 - after) * x0 + math.sqrt(after**2 - std**2) * x1
    else:
        g = 0.7 * (math.sqrt(sigma / (1 - sigma)) if dynamics == "flow_sde" else 1.0)
        std, mean = g * math.sqrt(-dt), 0.4 + (-0.9 + g**2 / (2 * sigma) * x1) * dt
    assert drawn.mean().item() == pytest.approx(mean, abs=4.5 * std / math.sqrt(count))
    assert drawn.var().item() == pytest.approx(std**2, rel=4.5 * math.sqrt(2 / count))


def test_R7_the_deviation_is_that_of_the_step() -> None:
    """Noise .7, dt -.04, x - mean .14: deviation .14, log-probability .5471743."""
    now = transition(torch.zeros(1, 1, dtype=F64), torch.zeros(1, 1, dtype=F64), interval(0.5, 0.46, 0.7), "dance_sde")
    assert now.std.item() == pytest.approx(0.14, rel=1e-14)
    assert log_prob(now, now.mean + 0.14).item() == pytest.approx(0.5471743, abs=5e-8)


def test_log_probability_is_that_of_torch_distributions() -> None:
    mean, std, taken = numbers("mean", 3, 2, 4), numbers("std", 3).abs() + 0.1, numbers("taken", 3, 2, 4)
    now = Transition(mean=mean, std=std, velocity=mean, dynamics="cps")
    theirs = torch.distributions.Normal(mean, std[:, None, None])
    expected = theirs.log_prob(taken).flatten(1)
    assert torch.allclose(log_prob(now, taken), expected.mean(1), atol=1e-6)
    assert torch.allclose(log_prob(now, taken, over="sum"), expected.sum(1), atol=1e-5)
    assert torch.allclose(entropy(now), theirs.entropy()[:, 0, 0], atol=1e-6)
    square = (taken - mean).square().flatten(1)
    assert torch.allclose(log_prob(now, taken, likelihood="unscaled"), -square.mean(1), atol=1e-6)


def test_what_was_taken_is_data() -> None:
    """Even where it was made of the mean: a gradient through it would cancel that of the mean."""
    mean = numbers("mean", 2, 3).requires_grad_()
    now = Transition(mean=mean, std=torch.full((2,), 0.5), velocity=mean, dynamics="cps")
    (gradient,) = torch.autograd.grad(log_prob(now, mean + 0.25).sum(), mean)
    assert torch.allclose(gradient, torch.full((2, 3), 0.25 / 0.5**2 / 3))


def test_what_is_masked_has_neither_value_nor_gradient() -> None:
    mask = torch.tensor([[True, False, True, False]])
    mean = torch.tensor([[0.1, math.nan, -0.2, 3.0]], requires_grad=True)
    now = Transition(mean=mean, std=torch.tensor([0.5]), velocity=mean, dynamics="cps")
    taken = torch.tensor([[0.0, 1.0, 0.0, math.inf]])
    value = log_prob(now, taken, mask=mask)
    (gradient,) = torch.autograd.grad(value.sum(), mean)
    short = Transition(mean=torch.tensor([[0.1, -0.2]]), std=now.std, velocity=torch.zeros(1, 2), dynamics="cps")
    assert value.item() == pytest.approx(log_prob(short, torch.zeros(1, 2)).item(), rel=1e-6)
    assert gradient[0, [1, 3]].tolist() == [0.0, 0.0] and gradient[0, 0] != 0


def test_arithmetic_is_float32_for_bfloat16_models() -> None:
    x, v = numbers("x", 2, 3).bfloat16(), numbers("v", 2, 3).bfloat16()
    at = intervals(flow_match(4), torch.full((4,), 0.7), torch.tensor([1, 2]))
    now = transition(x, v, at, "flow_sde")
    assert now.mean.dtype == torch.float32
    assert torch.equal(now.mean, transition(x.float(), v.float(), at, "flow_sde").mean)


def test_the_ode_has_no_density() -> None:
    now = transition(torch.ones(1, 2), torch.ones(1, 2), interval(0.5, 0.4, 0.0), "ode")
    with pytest.raises(RecordError, match="a step of the ODE has no log-probability"):
        log_prob(now, now.mean)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dynamics": "sde"}, "dynamics 'sde' does not exist; choose one of ode, flow_sde, dance_sde, cps"),
        ({"over": "median"}, "over 'median' does not exist"),
        ({"likelihood": "laplace"}, "likelihood 'laplace' does not exist"),
        ({"solver": "heun"}, "solver 'heun' does not exist; choose one of euler, unipc"),
        ({"solver": "unipc"}, "the solver 'unipc' is for the dynamics 'ode', received 'flow_sde'"),
        ({"guidance": 0.5}, "guidance must be at least 1"),
    ],
)
def test_a_process_that_is_none_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Process(**fields)  # type: ignore[arg-type]
