"""Proximal policy optimization with a critic (arXiv 1707.06347, for language models 2203.02155)."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout, Rollout
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import PPO
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import pipeline, train_step
from areno_fn.steps.joins import Stage
from areno_fn.steps.kl_control import adapted_kl_coef
from areno_fn.steps.objectives.separable import is_entropic
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.recipes.algorithm import ACTOR, CRITIC, NO_LOSSES, Algorithm, Materials, beginning, moving
from areno_fn.steps.recipes.sampled import (
    counted_places,
    iterated,
    kl_told,
    recalling,
    sampling_of,
    surrogate_of,
    token_rewards,
    updated,
)
from areno_fn.steps.returns import explained_variance, gae, whiten
from areno_fn.steps.token.experience import drawn_places, over_completions
from areno_fn.steps.token.report import describe
from areno_fn.steps.token.score import act
from areno_fn.steps.token.value import estimate, values_of
from areno_fn.steps.turns import Turn, in_turns

KL_SCALE = "kl_scale"
"""The control by which the coefficient of the KL in the reward is multiplied, to keep the KL near its target."""

ITERATIONS = "ppo_iterations"
"""The control that counts the iterations of the phase; in the first of them the critic is trained alone."""


def ppo(spec: PPO, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Proximal policy optimization: the advantage of every token, by a critic that is trained beside the actor.

    An iteration draws completions, takes the KL of every token from its reward, estimates advantages and returns
    (`gae`), and makes `epochs` x `minibatches` updates, each of the critic (`critic.updates` times) and of the actor.
    Values, old log-probabilities, advantages and returns are data, recorded before the first of them.

    Args:
        losses: for the actor, a stage `Actions -> Sums` instead of the clipped surrogate; for the critic, a stage
            `Estimates -> Sums` instead of the clipped value loss.
    """
    policy = materials.token_policy
    judging = materials.critic_policy or policy
    loss = losses.get(ACTOR) or surrogate_of(spec)
    move_actor = moving(pipeline(act(policy, spec.sampling, entropic=is_entropic(loss)), loss), materials)
    move_critic = train_step(
        pipeline(estimate(judging), losses.get(CRITIC) or value_clipped(spec.critic.clip, coef=spec.critic.coef)),
        materials.optimizers[CRITIC],
        role=CRITIC,
        view=materials.critic_view,
        prefix=CRITIC,
        donate=materials.donate,
        capture=materials.graphs or False,
    )
    critic_alone = in_turns(Turn(move_critic, spec.critic.updates))
    both = in_turns(Turn(move_critic, spec.critic.updates), Turn(move_actor))
    recall_logp, judge = recalling(spec, materials), values_of(judging)

    def recall(state: TrainState, batch: JudgedRollout) -> JudgedRollout:
        batch = recall_logp(state, batch)
        if batch.values is not None:
            return batch
        critic = materials.critic_view(state.params)
        values = over_completions(lambda packed: judge(critic, packed), batch.rollout, materials.micro_tokens)
        return replace(batch, values=values)

    def step(state: TrainState, batch: JudgedRollout) -> tuple[TrainState, Metrics]:
        batch = recall(state, batch)
        assert batch.values is not None
        drawn, counted = batch.rollout, counted_places(spec, batch.rollout)
        coef = spec.kl_coef * state.controls[KL_SCALE]
        told, rewards = kl_told(spec, batch, coef), token_rewards(spec, batch, coef)
        advantages, returns = gae(rewards, batch.values, drawn_places(drawn), gamma=spec.gamma, lam=spec.lam)
        told["critic/explained_variance"] = explained_variance(batch.values, returns, counted)
        advantages = whiten(advantages, counted) if spec.whiten else advantages
        update = critic_alone if _warms_up(spec, state) else both
        state, metrics = updated(update, spec, materials, state, batch, advantages, returns)
        state = replace(iterated(state), controls=_moved(spec, state, told, drawn))
        return state, metrics | describe(batch, advantages) | told

    ready = beginning(
        materials,
        keep_reference=spec.kl_coef > 0,
        controls={KL_SCALE: 1.0, ITERATIONS: 0},
    )

    def begin(state: TrainState) -> TrainState:
        if materials.begin_critic is not None:
            # what the optimizer of another critic has kept is nothing of this one's
            optim = {role: kept for role, kept in state.optim.items() if role != CRITIC}
            params = {**state.params, CRITIC: materials.begin_critic(state.params)}
            state = replace(state, params=params, optim=optim)
        return ready(state)

    return Algorithm(begin=begin, sample=sampling_of(spec, materials), step=step, recall=recall)


def _warms_up(spec: PPO, state: TrainState) -> bool:
    """Whether the critic is trained alone in the next iteration."""
    return state.controls[ITERATIONS] < spec.critic.warmup


def _moved(spec: PPO, state: TrainState, told: Metrics, drawn: Rollout) -> dict[str, int | float]:
    """The controls after an iteration. While the actor stands still, its distance says nothing of the coefficient."""
    scale = state.controls[KL_SCALE]
    if spec.kl_target and not _warms_up(spec, state):
        count = min(drawn.lengths.shape[0], spec.kl_horizon)
        scale = adapted_kl_coef(scale, told["rollout/kl"], target=spec.kl_target, count=count, horizon=spec.kl_horizon)
    return {**state.controls, KL_SCALE: scale, ITERATIONS: int(state.controls[ITERATIONS]) + 1}
