"""Algorithms whose decisions are the noisy denoising steps that were drawn: Flow-GRPO, GRPO-Guard and Flow-DPPO."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import FlowPrompts, Trajectory
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import FlowCoupled, FlowDPPO, FlowGRPO, FlowGRPOGuard, NoisyDenoising, refers
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.noise import noise_levels, noisy_subset, noisy_window
from areno_fn.steps.flow.objectives import coupled
from areno_fn.steps.flow.parts import limited
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.score import denoising, move, recall
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, moving, rollout_key
from areno_fn.steps.recipes.flow_copies import drawing_params, flow_beginning, lasting, reference_of, scoring_params
from areno_fn.steps.recipes.flow_drawing import process_of, schedule_of
from areno_fn.steps.recipes.flow_groups import advantages_of
from areno_fn.steps.recipes.flow_levels import noisy_candidates
from areno_fn.steps.recipes.sampled import iterated, updates_of
from areno_fn.steps.token.report import describe_rewards, mean_metrics


def flow_grpo(spec: FlowGRPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow-GRPO (arXiv 2505.05470) and, by its dynamics, DanceGRPO (2505.07818).

    Every iteration draws `samples` latents a prompt with noise in some steps, takes the reward's deviation from a baseline
    as the advantage of all noisy steps of a latent, and makes `epochs` x `minibatches` updates.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of the clipped surrogate.
    """
    surrogate = coupled.flow_grpo(spec.clip_low, spec.clip_high, kl_coef=spec.kl_coef, kl_space=spec.kl_space)
    return _stepwise(spec, materials, losses.get(ACTOR) or surrogate, before=False)


def flow_grpo_guard(spec: FlowGRPOGuard, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """GRPO-Guard (arXiv 2510.22319): `flow_grpo` with ratios that are centred and of one scale.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of its own.
    """
    surrogate = coupled.grpo_guard(
        spec.clip_low,
        spec.clip_high,
        step_reweight=spec.guard_step_reweight,
        kl_coef=spec.kl_coef,
        kl_space=spec.kl_space,
    )
    return _stepwise(spec, materials, losses.get(ACTOR) or surrogate, before=True)


def flow_dppo(spec: FlowDPPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Flow-DPPO (arXiv 2606.11025): `flow_grpo` with a trust region of transitions in the place of the clip.

    Args:
        losses: for the actor, a stage `Moves -> Sums` instead of its own.
    """
    surrogate = coupled.dppo(spec.threshold, space=spec.mask_space, kl_coef=spec.kl_coef, kl_space=spec.kl_space)
    return _stepwise(spec, materials, losses.get(ACTOR) or surrogate, before=True)


def noisy_steps(spec: NoisyDenoising, candidates: tuple[int, ...], key: Key) -> tuple[int, ...]:
    """The steps of one iteration that have noise.

    Args:
        spec: how many.
        candidates: what they are chosen from.
        key: of the iteration.
    """
    if not spec.count:
        return candidates
    return (noisy_window if spec.window else noisy_subset)(key, candidates, spec.count)


def _stepwise(spec: FlowCoupled, materials: Materials, loss: Stage, *, before: bool) -> Algorithm:
    """Draw with noise, judge, compare, and make `epochs` x `minibatches` updates on the noisy steps.

    Args:
        before: the loss reads the transitions under the parameters that drew.
    """
    policy, drawn_by = materials.flow_policy, spec.denoising
    process, schedule = process_of(drawn_by), schedule_of(drawn_by, materials.levels)
    candidates = noisy_candidates(drawn_by, schedule, materials.levels)
    rollout = limited(flow_sampler(policy, process), materials.micro_rows)
    update = moving(pipeline(move(policy), loss), materials)

    def sample(state: TrainState, prompts: FlowPrompts) -> Trajectory:
        key = rollout_key(state)
        levels = noise_levels(schedule.steps, noisy_steps(drawn_by, candidates, key.fold("noisy")), drawn_by.level)
        return rollout(drawing_params(spec, state, materials), prompts, key, schedule, levels, samples=spec.samples)

    def step(state: TrainState, batch: JudgedTrajectory) -> tuple[TrainState, Metrics]:
        drawn, advantages = batch.rollout, advantages_of(spec, batch, materials.compare)
        updates = updates_of(spec, state, drawn.ids.shape[0])
        first = lasting(state, materials, len(updates)) if before else state
        frozen = {"before": scoring_params(spec, first, materials)} if before else {}
        if refers(spec):
            frozen["reference"] = reference_of(spec, state, materials)
        reported = []
        for rows in updates:
            micro = denoising(drawn, advantages, rows=rows, micro=materials.micro_rows or None)
            state, metrics = update(state, tuple(recall(policy, one, **frozen) for one in micro) if frozen else micro)
            reported.append(metrics)
        return iterated(state), mean_metrics(reported) | describe_rewards(batch.rewards, drawn.groups, advantages)

    return Algorithm(begin=flow_beginning(spec, materials), sample=sample, step=step)
