"""The named algorithms of flow models are the compositions that the guide makes by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from flow_recipe_toys import KEY, POLICY, clean, judged, made, prompts, start, state_of

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.flow import Process
from areno_fn.contracts.flow_batch import Velocities
from areno_fn.contracts.spec import AdamWSpec, Denoising, FlowAWM, FlowGRPO, FlowNFT, FlowSFT, NoisyDenoising
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.times import Times, sampled_times
from areno_fn.steps.recipes.flow_drawing import drawing
from areno_fn.testing import laws


def test_supervised_steps_are_the_error_of_the_velocity_by_autograd() -> None:
    """The loss and the update of one step, written out with levels and noise by their keys."""
    batch, algorithm = clean(), made(FlowSFT(times="uniform", shift=2.0, weighting="data"))
    state = state_of(algorithm)
    key = KEY.fold("levels").fold(0).fold(0)
    sigma = sampled_times(Times(kind="uniform", shift=2.0), key.fold("level"), batch.prompts.ids)
    noise = latent_noise(key.fold("noise"), batch.prompts.ids, (1, 4, 4))
    share = sigma.reshape(-1, 1, 1, 1)
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params["actor"])
    mixed = (1 - share) * batch.latents + share * noise
    velocity = POLICY.velocity(params, mixed, sigma * 1000, batch.prompts.conditions.positive)
    loss = (sigma**2 * (velocity - (noise - batch.latents)).square().mean((1, 2, 3))).mean()
    loss.backward()
    after, metrics = algorithm.step(state, batch)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-6, rtol=1e-4, msg=path)


def test_every_supervised_step_has_levels_of_its_own() -> None:
    seen: list[torch.Tensor] = []

    def loss(found: Velocities) -> Sums:
        seen.append(found.batch.sigma)
        total = found.velocity.square().mean()
        return Sums(total=total, weight=total.new_tensor(1.0), stats={}, peaks={})

    algorithm = made(FlowSFT(), loss=loss)
    state = state_of(algorithm)
    for _ in range(2):
        state, _ = algorithm.step(state, clean())
    algorithm.step(state_of(algorithm), clean())
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("dynamics", ["flow_sde", "dance_sde", "cps"])
def test_before_the_first_update_the_ratio_is_1_and_the_distance_0(dynamics: Any) -> None:
    spec = FlowGRPO(samples=4, denoising=NoisyDenoising(steps=4, level=0.6, dynamics=dynamics), kl_coef=0.5)
    algorithm = made(spec)
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    assert [i >= 0 for i in batch.rollout.transition_map] == [True, True, True, False], "all noisy steps are trained on"
    after, metrics = algorithm.step(state, batch)
    assert metrics["train/ratio_max"] == metrics["train/ratio_mean"] == 1
    assert metrics["train/logp_diff_max"] == metrics["flow/kl"] == metrics["train/clip_fraction"] == 0
    assert metrics["flow/steps"] == 3 * 4 * 3
    assert metrics["rollout/advantage_mean"] == pytest.approx(0, abs=1e-6)
    assert after.counters.rollout_iteration == after.counters.optimizer_step == 1
    _, metrics = algorithm.step(after, judged(algorithm, after))
    assert metrics["flow/kl"] > 0 and metrics["train/ratio_max"] == 1


def test_the_first_update_is_the_policy_gradient_by_autograd() -> None:
    """Of the log-densities of the drawn steps, by torch.distributions, in a rollout written out as Flow-GRPO's formula."""
    algorithm = made(FlowGRPO(samples=4, denoising=NoisyDenoising(steps=4, level=0.6)))
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    drawn, rewards = batch.rollout, batch.rewards.reshape(3, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True)).reshape(-1)
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params["actor"])
    sigmas, total = [1.0, 0.75, 0.5, 0.25, 0.0], torch.zeros(())
    for step in range(3):
        x, taken = drawn.state(step), drawn.state(step + 1)
        sigma, dt = sigmas[step], sigmas[step + 1] - sigmas[step]
        g = 0.6 * (sigma / (1 - (sigmas[1] if step == 0 else sigma))) ** 0.5
        v = POLICY.velocity(params, x, torch.full((12,), 1000 * sigma), drawn.conditions.positive)
        mean = x + (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
        logp = torch.distributions.Normal(mean, g * (-dt) ** 0.5).log_prob(taken).mean((1, 2, 3))
        total = total - (advantages * logp).sum() / 36
    total.backward()
    after, _ = algorithm.step(state, batch)
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-6, rtol=1e-3, msg=path)


def _matched(advantages: torch.Tensor, v: Any, x: Any, clean: Any, sigma: Any) -> torch.Tensor:
    """DiffusionNFT with beta 1 and weights that are data, from its formula."""
    share = (0.5 + advantages / 10).clamp(0, 1)
    losses = []
    for velocity in (v, 2 * v.detach() - v):
        found = x - sigma.reshape(-1, 1, 1, 1) * velocity
        weight = (found - clean).abs().mean((1, 2, 3)).detach().clamp(min=1e-5)
        losses.append((found - clean).square().mean((1, 2, 3)) / weight)
    return (5 * (share * losses[0] + (1 - share) * losses[1])).mean()


def _weighted(advantages: torch.Tensor, v: Any, x: Any, clean: Any, sigma: Any) -> torch.Tensor:
    """AWM where nothing is clipped: -A exp(l_old - l), with l the squared velocity error."""
    target = (x - clean) / sigma.reshape(-1, 1, 1, 1)
    error = (v - target).square().mean((1, 2, 3))
    return (-advantages * torch.exp(error.detach() - error)).mean()


@pytest.mark.parametrize(
    ("spec", "formula"),
    [
        (FlowNFT(samples=4, denoising=Denoising(steps=3), terms=1), _matched),
        (FlowAWM(samples=4, denoising=Denoising(steps=3), terms=1), _weighted),
    ],
)
def test_rewards_of_noised_samples_by_autograd(spec: Any, formula: Any) -> None:
    algorithm = made(spec)
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    drawn, rewards = batch.rollout, batch.rewards.reshape(3, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True)).reshape(-1)
    key = KEY.fold("levels").fold(0).fold(0)
    sigma = sampled_times(Times(), key.fold("level"), drawn.ids)
    noise = latent_noise(key.fold("noise"), drawn.ids, (1, 4, 4))
    share = sigma.reshape(-1, 1, 1, 1)
    x = (1 - share) * drawn.final + share * noise
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), state.params["actor"])
    v = POLICY.velocity(params, x, sigma * 1000, drawn.conditions.positive)
    loss = formula(advantages, v, x, drawn.final, sigma)
    loss.backward()
    after, metrics = algorithm.step(state, batch)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-5, rtol=1e-3, msg=path)


@pytest.mark.parametrize(
    "spec",
    [
        FlowSFT(),
        FlowGRPO(samples=4, denoising=NoisyDenoising(steps=3), kl_coef=0.1, minibatches=2),
        FlowNFT(samples=4, denoising=Denoising(steps=2), kl_coef=0.1),
        FlowAWM(samples=4, denoising=Denoising(steps=2), epochs=2),
    ],
)
def test_a_step_is_a_function_of_its_arguments(spec: Any) -> None:
    algorithm = made(spec, af.adamw(AdamWSpec(lr=1e-2), 10))
    state = state_of(algorithm)
    batch = clean() if algorithm.sample is None else judged(algorithm, state)
    laws.step_is_pure(algorithm.step, state, batch, moves=("actor",))


def test_mini_batches_and_epochs_are_updates() -> None:
    spec = FlowGRPO(samples=4, denoising=NoisyDenoising(steps=3), minibatches=3, epochs=2)
    algorithm = made(spec, af.adamw(AdamWSpec(lr=1e-2), 10))
    state = state_of(algorithm)
    after, metrics = algorithm.step(state, judged(algorithm, state))
    assert (after.counters.optimizer_step, after.counters.rollout_iteration) == (6, 1)
    assert metrics["flow/steps"] == 2 * 12 * 2 and metrics["train/ratio_max"] > 1


def test_the_reference_is_renewed() -> None:
    algorithm = made(FlowGRPO(samples=4, denoising=NoisyDenoising(steps=3), kl_coef=0.1, reference_every=2))
    state, distances = state_of(algorithm), []
    for step in range(4):
        state = af.replace(state, cursor=af.Cursor(step=step))
        state, metrics = algorithm.step(state, judged(algorithm, state))
        distances.append(metrics["flow/kl"])
    assert distances[0] == distances[2] == 0 and min(distances[1], distances[3]) > 0


def test_evaluations_draw_by_the_ode_whatever_is_drawn_at_once() -> None:
    draw, params, spec = drawing(POLICY), start(), Denoising(steps=3, shift=2.0)
    whole = draw(params, prompts(5), KEY, spec, 5)
    torch.testing.assert_close(draw(params, prompts(5), KEY, spec, 2), whole, atol=1e-6, rtol=0)
    x = latent_noise(KEY.fold("start"), prompts(5).ids, (1, 4, 4))
    levels = [2 * u / (1 + u) for u in (1.0, 2 / 3, 1 / 3)] + [0.0]
    for sigma, after in pairwise(levels):
        with torch.no_grad():
            v = POLICY.velocity(params, x, torch.full((5,), 1000 * sigma), torch.arange(5) % 3)
        x = x + v * (after - sigma)
    torch.testing.assert_close(whole, x, atol=1e-5, rtol=1e-5)
    assert Process(dynamics="ode").guidance == 1
