"""Algorithms of flow models: supervised training on clean latents, and Flow-GRPO, DiffusionNFT and AWM on what was sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import FlowPrompts, Process, Trajectory
from areno_fn.contracts.flow_batch import Clean, JudgedTrajectory
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising, FlowAWM, FlowGRPO, FlowNFT, FlowNoised, FlowSFT
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives import coupled
from areno_fn.steps.flow.objectives.decoupled import advantage_weighted, diffusion_nft
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import denoising, move, recall
from areno_fn.steps.flow.times import Times
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, beginning, moving, start_of
from areno_fn.steps.recipes.sampled import iterated, updates_of
from areno_fn.steps.token.report import describe_rewards, mean_metrics


def flow_sft(spec: FlowSFT, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow matching (arXiv 2210.02747): the velocity at a random noise level of every latent.

    Levels and noise are functions of the run's key, the number of the step and the name of the latent.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of the squared error.
    """
    times = Times(kind=spec.times, shift=spec.shift)
    update = moving(
        pipeline(predict(materials.policy), losses.get(ACTOR) or velocity_matching(spec.weighting)), materials
    )

    def step(state: TrainState, batch: Clean) -> tuple[TrainState, Metrics]:
        key = state.key.fold("levels").fold(state.counters.optimizer_step)
        prompts = batch.prompts
        return update(state, noised(batch.latents, prompts.conditions, prompts.ids, key, times, mask=prompts.mask))

    return Algorithm(begin=beginning(materials, keep_reference=False), sample=None, step=step)


def flow_grpo(spec: FlowGRPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow-GRPO (arXiv 2505.05470) and, by its dynamics, DanceGRPO (2505.07818).

    Every iteration draws `samples` latents a prompt with noise in every step but the last, takes the reward's deviation
    from a baseline as the advantage of all noisy steps of a latent, and makes `epochs` x `minibatches` updates.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of the clipped surrogate.
    """
    policy = materials.policy
    process = Process(dynamics=spec.denoising.dynamics)
    schedule = flow_match(spec.denoising.steps, shift=spec.denoising.shift)
    levels = noise_levels(schedule.steps, None, spec.denoising.level)
    rollout, drawn_with = flow_sampler(policy, process), materials.drawn_with or materials.view
    surrogate = coupled.flow_grpo(spec.clip_low, spec.clip_high, kl_coef=spec.kl_coef, kl_space=spec.kl_space)
    update = moving(pipeline(move(policy), losses.get(ACTOR) or surrogate), materials)

    def sample(state: TrainState, prompts: FlowPrompts) -> Trajectory:
        key = state.key.fold("rollout").fold(state.counters.rollout_iteration)
        return rollout(drawn_with(state.params), prompts, key, schedule, levels, samples=spec.samples)

    def step(state: TrainState, batch: JudgedTrajectory) -> tuple[TrainState, Metrics]:
        drawn = batch.rollout
        advantages = group_advantages(batch.rewards, drawn.groups, baseline=spec.baseline, scale=spec.scale)
        reference = start_of(state, materials) if spec.kl_coef else None
        reported = []
        for rows in updates_of(spec, state, drawn.ids.shape[0]):
            micro = denoising(drawn, advantages, rows=rows.to(drawn.ids.device))
            if reference is not None:
                micro = tuple(recall(policy, one, reference=reference) for one in micro)
            state, metrics = update(state, micro)
            reported.append(metrics)
        return iterated(state), mean_metrics(reported) | describe_rewards(batch.rewards, drawn.groups, advantages)

    return Algorithm(begin=beginning(materials, keep_reference=spec.kl_coef > 0), sample=sample, step=step)


def flow_nft(spec: FlowNFT, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """DiffusionNFT (arXiv 2509.16117), with the policy that sampled as the old one.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    loss = diffusion_nft(spec.beta, max_advantage=spec.max_advantage, kl_coef=spec.kl_coef)
    return _noising(spec, materials, losses.get(ACTOR) or loss)


def flow_awm(spec: FlowAWM, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Advantage weighted matching (arXiv 2509.25050), without a running average.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    loss = advantage_weighted(
        spec.weighting, spec.clip_low, spec.clip_high, max_advantage=spec.max_advantage, kl_coef=spec.kl_coef
    )
    return _noising(spec, materials, losses.get(ACTOR) or loss)


def _noising(spec: FlowNoised, materials: Materials, loss: Stage) -> Algorithm:
    """Draw by the ODE, judge, compare, noise, and make `epochs` x `minibatches` updates, each with levels of its own.

    What the parameters that drew say of the noised samples is data, and so is what the reference says.
    """
    policy, times = materials.policy, Times(kind=spec.times, shift=spec.shift)
    schedule = flow_match(spec.denoising.steps, shift=spec.denoising.shift)
    rollout, drawn_with = flow_sampler(policy, Process(dynamics="ode")), materials.drawn_with or materials.view
    update = moving(pipeline(predict(policy), loss), materials)

    def sample(state: TrainState, prompts: FlowPrompts) -> Trajectory:
        key = state.key.fold("rollout").fold(state.counters.rollout_iteration)
        levels = torch.zeros(schedule.steps)
        return rollout(drawn_with(state.params), prompts, key, schedule, levels, samples=spec.samples)

    def step(state: TrainState, batch: JudgedTrajectory) -> tuple[TrainState, Metrics]:
        drawn = batch.rollout
        advantages = group_advantages(batch.rewards, drawn.groups, baseline=spec.baseline, scale=spec.scale)
        frozen = {"old": materials.view(state.params)}
        if spec.kl_coef:
            frozen["reference"] = start_of(state, materials)
        reported = []
        for rows in updates_of(spec, state, drawn.ids.shape[0]):
            rows = rows.to(drawn.ids.device)
            micro = noised(
                drawn.final[rows],
                tree.map(lambda x, rows=rows: x[rows], drawn.conditions),
                drawn.ids[rows],
                state.key.fold("levels").fold(state.counters.optimizer_step),
                times,
                terms=spec.terms,
                advantage=advantages[rows],
                groups=drawn.groups[rows],
                mask=None if drawn.mask is None else drawn.mask[rows],
            )
            state, metrics = update(state, tuple(remember(policy, one, **frozen) for one in micro))
            reported.append(metrics)
        return iterated(state), mean_metrics(reported) | describe_rewards(batch.rewards, drawn.groups, advantages)

    return Algorithm(begin=beginning(materials, keep_reference=spec.kl_coef > 0), sample=sample, step=step)


Draw = Callable[[Any, FlowPrompts, Key, Denoising, int], torch.Tensor]
"""`(params, prompts, key, spec, max_rows) -> latents [B, *]`."""


def drawing(policy: FlowPolicy) -> Draw:
    """A function that draws one latent a prompt by the ODE, as evaluations do.

    It draws at most `max_rows` at once, which changes nothing: noise is a function of the key and the prompt's name.

    Args:
        policy: the model.
    """
    rollout = flow_sampler(policy, Process(dynamics="ode"))

    def draw(params: Any, prompts: FlowPrompts, key: Key, spec: Denoising, max_rows: int) -> torch.Tensor:
        schedule = flow_match(spec.steps, shift=spec.shift)
        levels = torch.zeros(schedule.steps)
        rows = range(prompts.ids.shape[0])
        asked = [_some(prompts, rows[start : start + max_rows]) for start in rows[::max_rows]]
        return torch.cat([rollout(params, few, key, schedule, levels).final for few in asked])

    return draw


def _some(prompts: FlowPrompts, rows: range) -> FlowPrompts:
    taken: FlowPrompts = tree.map(lambda x: x[rows.start : rows.stop], prompts)
    return taken
