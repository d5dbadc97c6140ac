"""Classifier-free guidance of named algorithms: learned by leaving conditions out, the same in sampling and in training."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from flow_recipe_toys import KEY, POLICY, clean, judged, made, prompts, start, state_of

from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.flow import Conditions, FlowPrompts
from areno_fn.contracts.flow_batch import Moves, Velocities
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Denoising, FlowGRPO, FlowNFT, FlowSFT, NoisyDenoising
from areno_fn.steps.flow.noise import latent_noise, noise_levels
from areno_fn.steps.recipes.flow_drawing import drawing, process_of, schedule_of
from areno_fn.testing import laws

NOISY = NoisyDenoising(steps=4, level=0.6, guidance=2.5)


def guided(params: Any, x: torch.Tensor, sigma: float, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """v- + g (v+ - v-), each asked alone; label 3 is no class."""
    time = torch.full((x.shape[0],), 1000 * sigma)
    away = POLICY.velocity(params, x, time, torch.full_like(labels, 3))
    return away + scale * (POLICY.velocity(params, x, time, labels) - away)


def sums_of(values: torch.Tensor) -> Sums:
    return Sums(total=values.square().mean(), weight=values.new_tensor(1.0), stats={}, peaks={})


def labels_trained(share: float, ids: torch.Tensor | None = None) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def loss(found: Velocities) -> Sums:
        seen.append(found.batch.conditions.positive)
        assert found.batch.conditions.negative is None, "what is not asked is not carried"
        return sums_of(found.velocity)

    algorithm = made(FlowSFT(condition_dropout=share), loss=loss)
    batch = clean(60)
    if ids is not None:
        batch = tree.map(lambda x: x[ids], batch)
    algorithm.step(state_of(algorithm), batch)
    return seen[0]


def test_a_share_of_the_conditions_is_left_out_by_name() -> None:
    whole = torch.arange(60) % 3
    assert torch.equal(labels_trained(0.0), whole)
    assert torch.equal(labels_trained(1.0), torch.full((60,), 3))
    some = labels_trained(0.3)
    gone = some == 3
    assert 9 <= int(gone.sum()) <= 27 and torch.equal(some[~gone], whole[~gone])
    rows = torch.tensor([40, 3, 17, 59, 0, 21])
    assert torch.equal(labels_trained(0.3, rows), some[rows]), "which ones does not depend on the batch"


def test_every_step_leaves_out_others() -> None:
    seen: list[torch.Tensor] = []

    def loss(found: Velocities) -> Sums:
        seen.append(found.batch.conditions.positive)
        return sums_of(found.velocity)

    algorithm = made(FlowSFT(condition_dropout=0.5), loss=loss)
    state, _ = algorithm.step(state_of(algorithm), clean(60))
    algorithm.step(state, clean(60))
    assert not torch.equal(seen[0], seen[1])


def test_what_was_drawn_with_guidance_is_scored_with_it() -> None:
    """Ratio 1 and distance 0, exactly; scored without guidance, or with another, they are not."""
    algorithm = made(FlowGRPO(samples=4, denoising=NOISY, kl_coef=0.5))
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    _, metrics = algorithm.step(state, batch)
    assert metrics["train/ratio_max"] == metrics["train/ratio_mean"] == 1
    assert metrics["train/logp_diff_max"] == metrics["flow/kl"] == 0
    for wrong in (1.0, 2.4):
        process = attrs.evolve(batch.rollout.process, guidance=wrong)
        other = replace(batch, rollout=replace(batch.rollout, process=process))
        assert algorithm.step(state, other)[1]["train/logp_diff_max"] > 1e-4


def test_the_law_of_trajectories_holds_with_guidance() -> None:
    levels = noise_levels(4, None, 0.6)
    drawn = laws.trajectory_matches_training(
        POLICY, start(), prompts(3), KEY, process_of(NOISY), schedule_of(NOISY), levels
    )
    plain = attrs.evolve(drawn.process, guidance=1.0)
    assert drawn.process.guidance == 2.5 and plain != drawn.process


def test_the_velocity_that_is_trained_is_the_guided_one() -> None:
    seen: list[Moves] = []

    def loss(moves: Moves) -> Sums:
        seen.append(moves)
        return sums_of(moves.now.velocity)

    algorithm = made(FlowGRPO(samples=4, denoising=NOISY), loss=loss)
    state = state_of(algorithm)
    after, _ = algorithm.step(state, judged(algorithm, state))
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params["actor"])
    total = torch.zeros(())
    for step, sigma in enumerate((1.0, 0.75, 0.5)):
        batch = seen[step].batch
        expected = guided(params, batch.state, sigma, batch.conditions.positive, 2.5)
        torch.testing.assert_close(seen[step].now.velocity.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
        total = total + expected.square().mean()
    (total / 3).backward()
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-5, rtol=1e-3, msg=path)


@pytest.mark.parametrize("scale", [1.0, 1.5, 4.0])
def test_evaluations_and_noiseless_rollouts_draw_with_guidance(scale: float) -> None:
    params, spec = start(), Denoising(steps=3, guidance=scale)
    asked = prompts(5)
    whole = drawing(POLICY)(params, asked, KEY, spec, 2)
    x = latent_noise(KEY.fold("start"), asked.ids, (1, 4, 4))
    for sigma, after in pairwise((1.0, 2 / 3, 1 / 3, 0.0)):
        with torch.no_grad():
            x = x + guided(params, x, sigma, asked.conditions.positive, scale) * (after - sigma)
    torch.testing.assert_close(whole, x, atol=1e-5, rtol=1e-5)
    algorithm = made(FlowNFT(samples=2, denoising=spec))
    state = state_of(algorithm)
    drawn = judged(algorithm, state).rollout
    assert drawn.process.guidance == scale and drawn.process.dynamics == "ode"


def test_guidance_without_anything_to_lead_away_from_is_an_error() -> None:
    asked = prompts(2)
    bare = FlowPrompts(conditions=Conditions(positive=asked.conditions.positive), ids=asked.ids)
    with pytest.raises(Exception, match=r"guidance of 2.0 needs Conditions.negative, but there are none"):
        drawing(POLICY)(start(), bare, KEY, Denoising(steps=2, guidance=2.0), 2)


@pytest.mark.parametrize("steps", [4, 10])
def test_unipc_draws_what_the_scheduler_of_diffusers_draws(steps: int) -> None:
    from diffusers import UniPCMultistepScheduler

    params, asked = start(), prompts(3)
    spec = Denoising(steps=steps, shift=2.0, solver="unipc", guidance=1.5)
    found = drawing(POLICY)(params, asked, KEY, spec, 8)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0)
    scheduler.set_timesteps(steps)
    x = latent_noise(KEY.fold("start"), asked.ids, (1, 4, 4))
    for time in scheduler.timesteps:
        with torch.no_grad():
            v = guided(params, x, float(time) / 1000, asked.conditions.positive, 1.5)
        x = scheduler.step(v, time, x).prev_sample
    torch.testing.assert_close(found, x, atol=1e-5, rtol=1e-4)
    euler = drawing(POLICY)(params, asked, KEY, Denoising(steps=steps, shift=2.0, guidance=1.5), 8)
    assert not torch.allclose(found, euler, atol=1e-4)
