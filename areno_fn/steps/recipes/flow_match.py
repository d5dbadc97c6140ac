"""Generators of few steps: DMD2 and TDM, in which a fake follows the generator, and TDM-R1 with a surrogate of rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Trajectory
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.flow_match import Judges, Replay
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowDMD2, FlowMatched, FlowMatchedAlong, FlowTDM, FlowTDMR1, Forgetting
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import Objective, pipeline, train_step
from areno_fn.steps.flow.match import followed, match
from areno_fn.steps.flow.objectives.distribution import dmd2, rewarded_matching, trajectory_matching
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.objectives.preference import group_preference
from areno_fn.steps.flow.path import predict, remember
from areno_fn.steps.flow.replay import carried, replayed_once, replays
from areno_fn.steps.flow.times import Times
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import ACTOR, NO_LOSSES, Algorithm, Materials, Update, moving
from areno_fn.steps.recipes.flow_again import split
from areno_fn.steps.recipes.flow_copies import nearer
from areno_fn.steps.recipes.flow_drawing import process_of, schedule_of
from areno_fn.steps.recipes.flow_groups import advantages_of
from areno_fn.steps.recipes.flow_taught import (
    FAKE,
    SURROGATE,
    begun,
    reported_as,
    sampling_all,
    seen_as,
    teacher_of,
    teacher_policy,
)
from areno_fn.steps.recipes.sampled import iterated
from areno_fn.steps.token.report import describe_rewards
from areno_fn.steps.turns import Turn, in_turns
from areno_fn.steps.variants import Shelf, ema_begin, ema_params, masters_in

SLOW = "slow"
"""The snapshot that holds the slow average of the surrogate."""

SLOW_UPDATES = "slow_updates"
"""The control that counts its updates."""

Again = Callable[[Trajectory, Key], tuple[Replay, ...]]
"""`(rollout, key) -> ` the steps of the rollout that are taken again."""


def flow_dmd2(spec: FlowDMD2, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Distribution matching distillation (DMD2, arXiv 2405.14867), without its adversarial and regression terms.

    An iteration draws with the generator, which is the actor, trains the fake `fake_updates` times on what the
    generator sees in the states of one step of every latent, and then moves that from where the fake is to where the teacher is.
    Of which step, at which level and with which noise is drawn anew for every update.

    Args:
        losses: for the actor, a stage `Matched -> Sums` instead of its own; for the fake, a stage `Velocities -> Sums`.
    """
    times = _times(spec)

    def again(drawn: Trajectory, key: Key) -> tuple[Replay, ...]:
        return (replayed_once(drawn, key, times, real_guidance=spec.teacher_guidance),)

    return _matched(spec, materials, again, losses.get(FAKE) or velocity_matching(), losses.get(ACTOR) or dmd2())


def flow_tdm(spec: FlowTDM, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """Trajectory distribution matching (TDM, arXiv 2503.06674): as `flow_dmd2`, with all steps of every latent, each of which
    is noised on from the level that it ends at.

    Args:
        losses: as for `flow_dmd2`.
    """
    _require_room(spec, materials, 0.0)
    follow = losses.get(FAKE) or velocity_matching("data", snr_cap=spec.snr_cap)
    lead = losses.get(ACTOR) or trajectory_matching(huber=spec.huber)
    return _matched(spec, materials, _all_steps(spec), follow, lead)


def flow_tdm_r1(spec: FlowTDMR1, materials: Materials, losses: Mapping[str, Stage] = NO_LOSSES) -> Algorithm:
    """TDM towards rewards that have no gradient (TDM-R1, arXiv 2603.07700).

    An iteration draws groups, judges them, trains the fake `fake_updates` times, the surrogate once and the generator once. The
    surrogate learns which latents of a group are preferred; what it has learned beside the teacher is a direction of the
    generator's loss.

    The surrogate learns from the stored states of all steps, since on a path without noise they are worth what its end is
    worth. Such a state is noised on from its own level (`carried`), as the code of the paper's authors does; another
    implementation takes it for clean data, whatever noise it still holds, and asks at levels that its states do not have.

    Args:
        losses: for the actor and the fake as for `flow_dmd2`; for the surrogate, a stage `Velocities -> Sums`.
    """
    _require_room(spec, materials, spec.low)
    follow = losses.get(FAKE) or velocity_matching("data", snr_cap=spec.snr_cap)
    guided = spec.guidance_reward if spec.teacher_guidance > 1 else 0.0
    lead = losses.get(ACTOR) or rewarded_matching(mixture=spec.mixture, guidance_reward=guided, huber=spec.huber)
    algorithm = _matched(spec, materials, _all_steps(spec), follow, lead, _surrogate(spec, materials, losses))
    ready = begun(spec, materials, (FAKE, SURROGATE), {SLOW_UPDATES: 0})

    def begin(state: TrainState) -> TrainState:
        state = ready(state)
        slow = materials.shelves[SLOW].put(ema_begin(masters_in(state, SURROGATE)))
        return replace(state, snapshots={**state.snapshots, SLOW: slow})

    return Algorithm(begin=begin, sample=algorithm.sample, step=algorithm.step)


def _matched(
    spec: FlowMatched,
    materials: Materials,
    again: Again,
    following: Stage,
    leading: Stage,
    between: Update | None = None,
) -> Algorithm:
    """Draw, let the fake follow, and move the generator; `between` is the turn of a third role."""
    policy, view = materials.flow_policy, materials.view
    shown = match(policy, real=teacher_policy(spec, materials), rewards=between is not None)
    objective = pipeline(shown, leading)
    follow = _learning(FAKE, following, materials)

    def taken(state: TrainState, batch: Any, role: str) -> tuple[Replay, ...]:
        drawn = _drawn(batch)
        return split(again(drawn, _key(state, role)), drawn.ids, materials.micro_rows)

    def move_fake(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        return follow(state, tuple(followed(policy, view(state.params), one) for one in taken(state, batch, FAKE)))

    def move_generator(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        lead = _leading(objective, spec, state, materials, with_surrogate=between is not None)
        return lead(state, taken(state, batch, "generator"))

    turns = [Turn(reported_as(FAKE, move_fake), spec.fake_updates), Turn(move_generator)]
    update = in_turns(*turns) if between is None else in_turns(turns[0], Turn(between), turns[1])

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update(state, batch)
        return iterated(state), metrics | _worth(spec, batch, materials)

    sample = sampling_all(spec, materials, spec.denoising, process_of(spec.denoising))
    return Algorithm(begin=begun(spec, materials, (FAKE,)), sample=sample, step=step)


def _learning(role: str, loss: Stage, materials: Materials) -> Update:
    """The update of a role that learns velocities, by a stage `Velocities -> Sums`."""
    return train_step(
        pipeline(predict(materials.flow_policy), loss),
        materials.optimizers[role],
        role=role,
        view=seen_as(role, materials.view),
        prefix=role,
        donate=materials.donate,
    )


def _leading(
    objective: Objective, spec: FlowMatched, state: TrainState, materials: Materials, *, with_surrogate: bool
) -> Update:
    """The update of the generator with all judges as they are in a state."""
    teacher, view = teacher_of(spec, state, materials), materials.view
    fake, surrogate = seen_as(FAKE, view), seen_as(SURROGATE, view)

    def judges(params: Mapping[str, Any]) -> Judges:
        return Judges(
            generator=view(params),
            real=teacher,
            fake=fake(params),
            surrogate=surrogate(params) if with_surrogate else None,
        )

    return moving(objective, materials, judges)


def _surrogate(spec: FlowTDMR1, materials: Materials, losses: Mapping[str, Stage]) -> Update:
    """The turn of the surrogate, and behind it of its slow average."""
    policy, view, times = materials.flow_policy, materials.view, _times(spec)
    preference = losses.get(SURROGATE) or group_preference(
        spec.beta, max_advantage=spec.max_advantage, trust=spec.trust, runaway=spec.runaway, anchor=spec.anchor
    )
    learn = _learning(SURROGATE, preference, materials)
    taught_by = teacher_policy(spec, materials)

    def update(state: TrainState, batch: JudgedTrajectory) -> tuple[TrainState, Metrics]:
        drawn, advantages = batch.rollout, advantages_of(spec, batch, materials.compare)
        slow = ema_params(materials.shelves[SLOW].take(state.snapshots[SLOW]), state.params[SURROGATE])
        old = view({**state.params, ACTOR: slow})
        teacher = teacher_of(spec, state, materials)
        noised = carried(drawn, _key(state, SURROGATE), times, shared=drawn.groups, advantage=advantages)
        micro = [
            remember(taught_by, remember(policy, one, old=old), reference=teacher)
            for one in split(noised, drawn.groups, materials.micro_rows)
        ]
        state, metrics = learn(state, micro)
        return _slower(spec.slow, state, materials.shelves[SLOW]), metrics

    return reported_as(SURROGATE, update)


def _slower(spec: Forgetting, state: TrainState, shelf: Shelf) -> TrainState:
    """The state with the surrogate's average one update further."""
    made = int(state.controls[SLOW_UPDATES])
    slow = nearer(spec, state, SLOW, made, shelf, SURROGATE)
    return replace(
        state, snapshots={**state.snapshots, SLOW: slow}, controls={**state.controls, SLOW_UPDATES: made + 1}
    )


def _all_steps(spec: FlowMatchedAlong) -> Again:
    times = _times(spec)

    def again(drawn: Trajectory, key: Key) -> tuple[Replay, ...]:
        return replays(drawn, key, times, query=spec.query, real_guidance=spec.teacher_guidance)

    return again


def _require_room(spec: FlowMatchedAlong, materials: Materials, low: float) -> None:
    """A state that ends at a level can only be noised on to a higher one.

    Args:
        low: the share of the way from there to 1 at which levels begin.

    Raises:
        SpecError: the first step ends above all levels.
    """
    if spec.query == "interval" and not low:
        return
    end = float(schedule_of(spec.denoising, materials.levels).sigmas[1])
    begin = end + (1 - end) * low
    if begin >= spec.high:
        raise SpecError(
            f"algorithm.high: the first of {spec.denoising.steps} steps ends at {end:.4g}, and what is noised on from there has "
            f"levels from {begin:.4g} to high = {spec.high:g}, which are none; raise it, or take fewer steps or a lower shift"
        )


def _times(spec: FlowMatched) -> Times:
    return Times(kind=spec.times, shift=spec.shift, low=spec.low, high=spec.high)


def _key(state: TrainState, role: str) -> Key:
    """The random stream of the next update of a role."""
    return state.key.fold(role).fold(state.counters.optimizer_step)


def _drawn(batch: Trajectory | JudgedTrajectory) -> Trajectory:
    return batch.rollout if isinstance(batch, JudgedTrajectory) else batch


def _worth(spec: FlowMatched, batch: Trajectory | JudgedTrajectory, materials: Materials) -> Metrics:
    """What rewards say of a rollout, where there are any."""
    if not isinstance(batch, JudgedTrajectory) or not isinstance(spec, FlowTDMR1):
        return {}
    return describe_rewards(batch.rewards, batch.rollout.groups, advantages_of(spec, batch, materials.compare))
