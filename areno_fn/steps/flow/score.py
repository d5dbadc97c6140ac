"""From a trajectory to decisions, and their log-probabilities under the current parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.actions import Actions
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow import Trajectory, Transition
from areno_fn.contracts.flow_batch import Denoising, Moves
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.record import replace, shown
from areno_fn.steps.chosen import require_rows
from areno_fn.steps.flow.alive import counted_steps
from areno_fn.steps.flow.guidance import guided, require_policy
from areno_fn.steps.flow.schedule import intervals, places
from areno_fn.steps.flow.transition import entropy, log_prob, transition


@checked
def denoising(
    trajectory: Trajectory,
    advantages: torch.Tensor,
    *,
    steps: Sequence[int] | None = None,
    rows: torch.Tensor | None = None,
    micro: int | None = None,
    weight: torch.Tensor | None = None,
) -> tuple[Denoising, ...]:
    """The micro-batches of an update: every one holds one step of some rows, as the rollout computed them.

    Each (row, step) is one decision. The mean is over decisions, however many steps a row is trained on.

    Args:
        trajectory: B rows.
        advantages: float32 [B].
        steps: which; those with a stored log-probability when omitted.
        rows: int64 [M], which rows, negative ones counted from the end; all when omitted.
        micro: most rows of a micro-batch; no limit when omitted.
        weight: float32 [B], 1 when omitted.

    Raises:
        RecordError: types or shapes do not fit, a row does not exist, a step was not stored, or steps with and without noise are
            mixed.
    """
    if micro is not None and micro < 0:
        raise RecordError(f"micro is the most rows of a micro-batch, received {micro}; leave it out for no limit")
    count = trajectory.ids.shape[0]
    if rows is not None:
        require_rows(rows, count, "the trajectory")
    for name, given in (("advantages", advantages), ("weight", weight)):
        if given is not None and (given.shape != (count,) or not given.is_floating_point()):
            raise RecordError(
                f"{name} is {shown(given)}, but the trajectory has {count} rows; give one floating number for each"
            )
    scored = [i for i, place in enumerate(trajectory.transition_map) if place >= 0]
    chosen = places(scored if steps is None else steps, trajectory.schedule.steps)
    noisy = {bool(trajectory.levels[step] != 0) for step in chosen}
    if len(noisy) != 1:
        what = "steps with and without noise together" if noisy else "no step; name steps that the trajectory stored"
        raise RecordError(f"an update was given {what}, but needs steps of one kind")
    device = trajectory.ids.device
    every = torch.arange(count, device=device) if rows is None else rows.to(device)
    parts = torch.split(every, micro or max(every.shape[0], 1))
    weights = torch.ones_like(advantages) if weight is None else weight
    return tuple(_decisions(trajectory, step, part, advantages, weights) for step in chosen for part in parts)


def act_flow(policy: FlowPolicy) -> Callable[[Any, Denoising], Actions]:
    """The stage `(params, Denoising) -> Actions`, which every policy-gradient loss of tokens takes too.

    Raises:
        SpecError: it is no `FlowPolicy`.
    """
    require_policy(policy)

    def stage(params: Any, batch: Denoising) -> Actions:
        batch = counted_steps(batch)
        return _actions(_transition(policy, params, batch), batch)

    return stage


def move(policy: FlowPolicy) -> Callable[[Any, Denoising], Moves]:
    """The stage `(params, Denoising) -> Moves`, for losses that also compare transitions.

    Raises:
        SpecError: it is no `FlowPolicy`.
    """
    require_policy(policy)

    def stage(params: Any, batch: Denoising) -> Moves:
        batch = counted_steps(batch)
        now = _transition(policy, params, batch)
        return Moves(now=now, actions=None if batch.old is None else _actions(now, batch), batch=batch)

    return stage


def recall(policy: FlowPolicy, batch: Denoising, **parameters: Any) -> Denoising:
    """The batch with the transitions of frozen parameters, without a gradient.

    Args:
        policy: the model.
        batch: recorded steps.
        parameters: by the field that is filled: `before` or `reference`.
    """
    shown = counted_steps(batch)
    with torch.no_grad():
        return replace(batch, **{name: _transition(policy, params, shown) for name, params in parameters.items()})


def _transition(policy: FlowPolicy, params: Any, batch: Denoising) -> Transition:
    ask = guided(policy, batch.process.guidance)
    velocity = ask(params, batch.state, batch.interval.timestep, batch.conditions)
    return transition(batch.state, velocity, batch.interval, batch.process.dynamics)


def _actions(now: Transition, batch: Denoising) -> Actions:
    if batch.old is None:
        raise RecordError("steps without noise have no log-probability; train on steps that the rollout drew")
    process = batch.process
    return Actions(
        logp=log_prob(now, batch.taken, over=process.over, likelihood=process.likelihood, mask=batch.mask),
        weight=batch.weight,
        segments=batch.segments,
        entropy=entropy(now).detach(),
        old=batch.old,
        advantage=batch.advantage,
        documents=batch.documents,
    )


def _decisions(
    trajectory: Trajectory,
    step: int,
    rows: torch.Tensor,
    advantages: torch.Tensor,
    weight: torch.Tensor,
) -> Denoising:
    noisy = bool(trajectory.levels[step] != 0)
    return Denoising(
        state=trajectory.state(step)[rows],
        taken=trajectory.state(step + 1)[rows],
        interval=intervals(trajectory.schedule, trajectory.levels, torch.full_like(rows, step)),
        conditions=tree.map(lambda x: x[rows], trajectory.conditions),
        old=trajectory.recorded(step)[rows] if noisy else None,
        advantage=advantages[rows],
        weight=weight[rows],
        segments=torch.arange(rows.shape[0], device=rows.device),
        mask=None if trajectory.mask is None else trajectory.mask[rows],
        documents=rows.shape[0],
        process=trajectory.process,
    )
