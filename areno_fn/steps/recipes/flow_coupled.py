"""Algorithms whose decisions are the noisy denoising steps that were drawn: Flow-GRPO."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.spec import FlowGRPO
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives import coupled
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.score import denoising, move, recall
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, beginning, moving, start_of
from areno_fn.steps.recipes.flow_drawing import process_of, schedule_of
from areno_fn.steps.recipes.sampled import iterated, updates_of
from areno_fn.steps.token.report import describe_rewards, mean_metrics


def flow_grpo(spec: FlowGRPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow-GRPO (arXiv 2505.05470) and, by its dynamics, DanceGRPO (2505.07818).

    Every iteration draws `samples` latents a prompt with noise in every step but the last, takes the reward's deviation
    from a baseline as the advantage of all noisy steps of a latent, and makes `epochs` x `minibatches` updates.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of the clipped surrogate.
    """
    policy = materials.policy
    process, schedule = process_of(spec.denoising), schedule_of(spec.denoising)
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
