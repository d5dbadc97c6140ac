"""What a recipe is built from, and what it makes: a phase of training as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout, PackedTokens
from areno_fn.contracts.flow_adapter import EVEN, NoiseLevels
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import EMA
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import Compare
from areno_fn.steps.capture import Graphs
from areno_fn.steps.compose import Objective, View, train_step
from areno_fn.steps.joins import Stage
from areno_fn.steps.optimizers.master import continued
from areno_fn.steps.variants import AVERAGE, Shelf, averaging, followed, snapshot

ACTOR = "actor"
CRITIC = "critic"
REFERENCE = "reference"
SHELVES: Mapping[str, Shelf] = MappingProxyType(
    {REFERENCE: Shelf(put=snapshot), AVERAGE: Shelf(), "old": Shelf(), "sampler": Shelf(), "slow": Shelf()}
)
"""Snapshots that lie beside the parameters."""

Losses = Stage | Mapping[str, Stage]
"""A loss of one's own, which is the actor's, or losses by role."""

NO_LOSSES: Mapping[str, Stage] = MappingProxyType({})
"""By role, no loss of one's own."""

Update = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""`(state, batch) -> (state, metrics)`."""


def actor(params: Mapping[str, Any]) -> Any:
    """The view of a run that trains all parameters: those of the actor, as they are."""
    return params[ACTOR]


def critic(params: Mapping[str, Any]) -> Any:
    """The same of the critic, a `Valued`."""
    return params[CRITIC]


@attrs.frozen(kw_only=True)
class Teaching:
    """A teacher from a folder.

    Attributes:
        role: its key in the parameters.
        policy: its functions.
    """

    role: str
    policy: FlowPolicy


NO_TEACHERS: Mapping[str, Teaching] = MappingProxyType({})
"""By path, none."""


@attrs.frozen(kw_only=True)
class Materials:
    """What a recipe is built from.

    Attributes:
        policy: the model's functions: a `TokenPolicy`, or a `FlowPolicy` for the algorithms of flow models.
        optimizers: by role, what moves it in this phase.
        stop: token ids that end a completion.
        micro_tokens: token budget of a micro-batch.
        micro_rows: most pictures that are drawn at once, or trained on in one; 0 for all.
        max_length: longest training row, the length that "constant_length" divides by where no other is given.
        max_rows: most sequences decoded at once.
        view: from the parameters of all roles to what the policy takes; rollouts, training and the reference use it.
        critic_policy: the functions of the critic's trunk; those of `policy` when None.
        critic_view: from the parameters of all roles to a `Valued`.
        teachers: those that are read from folders, by path.
        sources: the data set of every prompt, by its name or place.
        drawn_with: what rollouts use instead of `view`, with the same log-probabilities up to roundings; None for `view`.
        ema: the average that is kept of the actor; None for none.
        shelves: where the snapshots lie, by name.
        donate: whether a step may write to the parameters and moments of its state, which is unreadable afterwards.
        graphs: where updates that are captured on a GPU are kept; None captures none. It needs `donate`.
        begin_critic: from the parameters of all roles to those that the critic begins a phase with; None where it goes
            on with what it has.
        compare: says advantages in the place of `group_advantages`; None for that.
        levels: how the scheduler of a flow model spaces noise levels.
    """

    policy: TokenPolicy | FlowPolicy
    optimizers: Mapping[str, Optimizer]
    stop: tuple[int, ...] = ()
    micro_tokens: int = 8192
    micro_rows: int = 0
    max_length: int = 1024
    max_rows: int = 1024
    view: View = actor
    critic_policy: TokenPolicy | None = None
    critic_view: View = critic
    teachers: Mapping[str, Teaching] = NO_TEACHERS
    sources: tuple[str, ...] = ()
    begin_critic: Callable[[Mapping[str, Any]], Any] | None = None
    drawn_with: View | None = None
    ema: EMA | None = None
    donate: bool = False
    graphs: Graphs | None = None
    shelves: Mapping[str, Shelf] = SHELVES
    compare: Compare | None = None
    levels: NoiseLevels = EVEN

    @property
    def token_policy(self) -> TokenPolicy:
        """The policy of an algorithm of text, which the plan has matched with a model of text."""
        return cast(TokenPolicy, self.policy)

    @property
    def flow_policy(self) -> FlowPolicy:
        """The policy of an algorithm of flow models, likewise."""
        return cast(FlowPolicy, self.policy)


@attrs.frozen(kw_only=True)
class Algorithm:
    """One phase of training as pure functions.

    Attributes:
        begin: readies a state for the phase: fresh optimizer states, snapshots taken of the parameters.
        sample: draws a `Rollout` for `Prompts`, or a `Trajectory` for `FlowPrompts`; None for algorithms that read a
            data set.
        step: `(state, batch) -> (state, metrics)`; the batch of a data-set algorithm is a tuple of `PackedTokens` or
            `Pairs` micro-batches, or a `Clean`, and that of a generating one a `JudgedRollout` or a `JudgedTrajectory`,
            or what `sample` returned where no reward judges it.
        recall: for generating algorithms, `(state, judged) -> judged` with what frozen and current parameters say of the
            drawn tokens. `step` calls it where that has not been done.
        refer: log-probabilities [M] that the frozen reference gives packed pairs; None for algorithms without pairs.
    """

    begin: Callable[[TrainState], TrainState]
    sample: Callable[[TrainState, Any], Any] | None
    step: Update
    recall: Callable[[TrainState, JudgedRollout], JudgedRollout] | None = None
    refer: Callable[[TrainState, PackedTokens], torch.Tensor] | None = None


def beginning(
    materials: Materials, *, keep_reference: bool, controls: Mapping[str, int | float] | None = None
) -> Callable[[TrainState], TrainState]:
    """A function that readies a state for a phase: every optimizer begins afresh, and so does an average of the actor.

    Args:
        materials: of the phase.
        keep_reference: the actor as it is now is kept as the snapshot `reference`.
        controls: the numbers that the phase begins with.
    """

    def begin(state: TrainState) -> TrainState:
        state = replace(
            state,
            optim={role: _ready(state, role, optimizer) for role, optimizer in materials.optimizers.items()},
            snapshots={REFERENCE: materials.shelves[REFERENCE].put(state.params[ACTOR])} if keep_reference else {},
            controls=dict(controls or {}),
        )
        return state if materials.ema is None else averaging(state, ACTOR, materials.shelves[AVERAGE])

    return begin


def _ready(state: TrainState, role: str, optimizer: Optimizer) -> Any:
    """A fresh optimizer state, but for the float32 masters that the phase before has left."""
    params = state.params[role]
    return continued(optimizer.init(params), state.optim.get(role), params)


def moving(objective: Objective, materials: Materials, view: View | None = None) -> Update:
    """One update of the actor, and behind it of its average.

    Args:
        view: what the objective takes in the place of the policy's view.
    """
    update = train_step(
        objective,
        materials.optimizers[ACTOR],
        role=ACTOR,
        view=view or materials.view,
        donate=materials.donate,
        capture=materials.graphs or False,
    )
    return update if materials.ema is None else followed(update, materials.ema, ACTOR, materials.shelves[AVERAGE])


def rollout_key(state: TrainState) -> Key:
    """The random stream of the next rollout: of the run's key and the number of rollouts made."""
    return state.key.fold("rollout").fold(state.counters.rollout_iteration)


def start_of(state: TrainState, materials: Materials) -> Any:
    """What the policy took when the phase began, or when its reference was last renewed."""
    reference = materials.shelves[REFERENCE].take(state.snapshots[REFERENCE])
    return materials.view({**state.params, ACTOR: reference})
