"""Algorithms that noise again what was drawn: DiffusionNFT, AWM, DGPO, CRD, and Diffusion-DPO of what was drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.spec import (
    FlowAWM,
    FlowCRD,
    FlowDGPO,
    FlowNFT,
    FlowNoised,
    FlowOnlineDPO,
    FlowWhole,
    copies_of,
    refers,
)
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline
from areno_fn.steps.flow.objectives.decoupled import advantage_weighted, centred_reward, diffusion_nft
from areno_fn.steps.flow.objectives.preference import diffusion_dpo, group_preference
from areno_fn.steps.flow.path import predict
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, moving
from areno_fn.steps.recipes.flow_again import noised_again, noiseless, remembered, times_of
from areno_fn.steps.recipes.flow_copies import (
    OLD,
    SAMPLER,
    copy_of,
    drawing_params,
    flow_beginning,
    followed,
    lasting,
    reference_of,
    scoring_params,
    updates_made,
)
from areno_fn.steps.recipes.flow_groups import advantages_of, rows_of_updates
from areno_fn.steps.recipes.sampled import iterated
from areno_fn.steps.token.report import describe_rewards, mean_metrics
from areno_fn.steps.variants import AVERAGE

Params = Callable[[TrainState], Any]
"""From a state to what the policy takes."""


def flow_nft(spec: FlowNFT, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """DiffusionNFT (arXiv 2509.16117), with the policy that sampled as the old one.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    loss = diffusion_nft(spec.beta, max_advantage=spec.max_advantage, kl_coef=spec.kl_coef)
    copy = None if spec.old is None else partial(copy_of, materials=materials, name=OLD)
    old = copy or partial(scoring_params, spec, materials=materials)
    return _rewarded(spec, materials, losses.get(ACTOR) or loss, draws=copy, said={"old": old})


def flow_awm(spec: FlowAWM, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Advantage weighted matching (arXiv 2509.25050).

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    loss = advantage_weighted(
        spec.weighting,
        spec.clip_low,
        spec.clip_high,
        max_advantage=spec.max_advantage,
        kl_coef=spec.kl_coef,
        average_kl_coef=spec.ema_coef,
    )
    said: dict[str, Params] = {"old": partial(scoring_params, spec, materials=materials)}
    if spec.ema_coef:
        said["average"] = partial(copy_of, materials=materials, name=AVERAGE)
    return _rewarded(spec, materials, losses.get(ACTOR) or loss, said=said)


def flow_dgpo(spec: FlowDGPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """DGPO (arXiv 2510.08425).

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    loss = group_preference(spec.beta, max_advantage=spec.max_advantage, trust=spec.clip, kl_coef=spec.kl_coef)
    old = partial(copy_of, materials=materials, name=OLD)

    def draws(state: TrainState) -> Any:
        return old(state) if updates_made(state) >= spec.draw_old else drawing_params(spec, state, materials)

    said = {"old": old} if spec.clip else {}
    return _rewarded(
        spec,
        materials,
        losses.get(ACTOR) or loss,
        draws=draws,
        said=said,
        guidance=spec.reference_guidance,
        one_noise=True,
        at_once=True,
    )


def flow_crd(spec: FlowCRD, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Centred reward distillation (arXiv 2603.14128).

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    loss = centred_reward(
        spec.beta,
        loss=spec.loss,
        temperature=spec.temperature,
        max_advantage=spec.max_advantage,
        kl_coef=spec.kl_coef,
        kl_floor=spec.kl_floor,
    )
    return _rewarded(
        spec,
        materials,
        losses.get(ACTOR) or loss,
        draws=partial(copy_of, materials=materials, name=SAMPLER),
        said={"old": partial(copy_of, materials=materials, name=OLD)},
        guidance=spec.reference_guidance,
    )


def flow_online_dpo(spec: FlowOnlineDPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Diffusion-DPO (arXiv 2311.12908) of the best and the worst of every group.

    Args:
        losses: for the actor, a stage `Velocities -> Sums` instead of its own.
    """
    return _rewarded(spec, materials, losses.get(ACTOR) or diffusion_dpo(spec.beta))


def _rewarded(
    spec: FlowNoised,
    materials: Materials,
    loss: Stage,
    *,
    draws: Params | None = None,
    said: Mapping[str, Params] = {},
    guidance: float = 1.0,
    one_noise: bool = False,
    at_once: bool = False,
) -> Algorithm:
    """Draw, judge, compare, noise, and make `epochs` x `minibatches` updates, each with levels of its own.

    What frozen parameters say of the noised samples is data.

    Args:
        draws: what draws; the actor or its average when None.
        said: by field of `Noised`, other frozen parameters than the reference, as they are when an iteration begins.
        guidance: of the reference.
        one_noise: a sample has one noise at all levels of an update.
        at_once: copies follow the actor after every update, and `said` with them; else after every iteration.
    """
    policy, copies = materials.flow_policy, copies_of(spec)
    update, times = moving(pipeline(predict(policy), loss), materials), times_of(spec, materials.levels)
    drawing = draws or (lambda state: drawing_params(spec, state, materials))

    def step(state: TrainState, batch: JudgedTrajectory) -> tuple[TrainState, Metrics]:
        drawn, advantages = batch.rollout, advantages_of(spec, batch, materials.compare)
        updates = rows_of_updates(spec, state, drawn.groups, advantages)
        reference = {"reference": reference_of(spec, state, materials)} if refers(spec) else {}
        first = lasting(state, materials, len(updates))
        frozen = {name: params(first) for name, params in said.items()}
        reported = []
        for rows in updates:
            micro = noised_again(
                spec,
                drawn,
                advantages,
                rows.to(drawn.ids.device),
                state.key.fold("levels").fold(state.counters.optimizer_step),
                times,
                together=isinstance(spec, FlowWhole | FlowOnlineDPO),
                one_noise=one_noise,
                most=materials.micro_rows,
            )
            known = tuple(remembered(policy, one, frozen | reference, guidance) for one in micro)
            state, metrics = update(state, known)
            if at_once:
                state = followed(state, copies, materials)
                frozen = {name: params(state) for name, params in said.items()}
            reported.append(metrics)
        state = state if at_once or not copies else followed(state, copies, materials)
        told = mean_metrics(reported) if reported else {}
        return iterated(state), told | describe_rewards(batch.rewards, drawn.groups, advantages)

    return Algorithm(begin=flow_beginning(spec, materials), sample=noiseless(spec, materials, drawing), step=step)
