"""What a recipe is built from, and what it makes: a phase of training as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import PackedTokens, Prompts, Rollout
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import TrainState
from areno_fn.steps.compose import View

ACTOR = "actor"
CRITIC = "critic"
REFERENCE = "reference"

Update = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""`(state, batch) -> (state, metrics)`."""


def actor(params: Mapping[str, Any]) -> Any:
    """The view of a run that trains all parameters: those of the actor, as they are."""
    return params[ACTOR]


def critic(params: Mapping[str, Any]) -> Any:
    """The same of the critic, a `Valued`."""
    return params[CRITIC]


@attrs.frozen(kw_only=True)
class Materials:
    """What a recipe is built from.

    Attributes:
        policy: the model's functions.
        optimizers: by role, what moves it in this phase.
        stop: token ids that end a completion.
        micro_tokens: token budget of a micro-batch.
        max_length: longest training row, the length that "constant_length" divides by where no other is given.
        max_rows: most sequences decoded at once.
        view: from the parameters of all roles to what the policy takes; rollouts, training and the reference use it.
        critic_policy: the functions of the critic's trunk; those of `policy` when None.
        critic_view: from the parameters of all roles to a `Valued`.
        begin_critic: from the parameters of all roles to those that the critic begins a phase with; None where it goes
            on with what it has.
    """

    policy: TokenPolicy
    optimizers: Mapping[str, Optimizer]
    stop: tuple[int, ...]
    micro_tokens: int = 8192
    max_length: int = 1024
    max_rows: int = 1024
    view: View = actor
    critic_policy: TokenPolicy | None = None
    critic_view: View = critic
    begin_critic: Callable[[Mapping[str, Any]], Any] | None = None


@attrs.frozen(kw_only=True)
class Algorithm:
    """One phase of training as pure functions.

    Attributes:
        begin: readies a state for the phase: fresh optimizer states, snapshots taken of the parameters.
        sample: draws completions for a batch of prompts; None for algorithms that read a data set.
        step: `(state, batch) -> (state, metrics)`; the batch is a tuple of `PackedTokens` micro-batches
            or `Pairs` micro-batches for data-set algorithms and a `JudgedRollout` for generating ones.
        refer: log-probabilities [M] that the frozen reference gives packed pairs; None for algorithms without pairs.
    """

    begin: Callable[[TrainState], TrainState]
    sample: Callable[[TrainState, Prompts], Rollout] | None
    step: Update
    refer: Callable[[TrainState, PackedTokens], torch.Tensor] | None = None


def beginning(
    optimizers: Mapping[str, Optimizer], *, keep_reference: bool, controls: Mapping[str, int | float] | None = None
) -> Callable[[TrainState], TrainState]:
    """A function that readies a state for a phase.

    Args:
        optimizers: by role, what moves it; each begins afresh.
        keep_reference: the actor as it is now is kept as the snapshot `reference`.
        controls: the numbers that the phase begins with.
    """

    def begin(state: TrainState) -> TrainState:
        return replace(
            state,
            optim={role: optimizer.init(state.params[role]) for role, optimizer in optimizers.items()},
            snapshots={REFERENCE: state.params[ACTOR]} if keep_reference else {},
            controls=dict(controls or {}),
        )

    return begin


def start_of(state: TrainState, view: View) -> Any:
    """What the policy took when the phase began."""
    return view({**state.params, ACTOR: state.snapshots[REFERENCE]})
