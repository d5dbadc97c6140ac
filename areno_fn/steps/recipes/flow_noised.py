"""Algorithms that noise again what was drawn without noise: DiffusionNFT and advantage weighted matching."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from areno_fn import tree
from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.spec import FlowAWM, FlowNFT, FlowNoised
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.objectives.decoupled import advantage_weighted, diffusion_nft
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.times import Times
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, beginning, moving, start_of
from areno_fn.steps.recipes.flow_drawing import process_of, schedule_of
from areno_fn.steps.recipes.sampled import iterated, updates_of
from areno_fn.steps.token.report import describe_rewards, mean_metrics
from areno_fn.steps.variants import snapshot


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
    schedule = schedule_of(spec.denoising)
    rollout, drawn_with = flow_sampler(policy, process_of(spec.denoising)), materials.drawn_with or materials.view
    update = moving(pipeline(predict(policy), loss), materials)

    def sample(state: TrainState, prompts: FlowPrompts) -> Trajectory:
        key = state.key.fold("rollout").fold(state.counters.rollout_iteration)
        levels = torch.zeros(schedule.steps)
        return rollout(drawn_with(state.params), prompts, key, schedule, levels, samples=spec.samples)

    def step(state: TrainState, batch: JudgedTrajectory) -> tuple[TrainState, Metrics]:
        drawn = batch.rollout
        advantages = group_advantages(batch.rewards, drawn.groups, baseline=spec.baseline, scale=spec.scale)
        updates = updates_of(spec, state, drawn.ids.shape[0])
        own = state.params[ACTOR]
        if materials.donate and len(updates) > 1:  # the first of them would move what drew
            own = snapshot(own)
        frozen = {"old": materials.view({**state.params, ACTOR: own})}
        if spec.kl_coef:
            frozen["reference"] = start_of(state, materials)
        reported = []
        for rows in updates:
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
