"""Copies of the actor that follow it through a phase, and whose parameters draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import FlowGrouped, FlowReferred, Forgetting, copies_of, refers
from areno_fn.contracts.state import TrainState
from areno_fn.steps.flow.decay import ramped_decay
from areno_fn.steps.recipes.algorithm import ACTOR, Materials, beginning, start_of
from areno_fn.steps.variants import AVERAGE, Shelf, ema_begin, ema_params, ema_update, masters_in, snapshot

OLD, SAMPLER = "old", "sampler"
"""The snapshots of the copies."""
BEGAN = "copies_began"
"""The control that holds the optimizer step at which a phase with copies began."""


def flow_beginning(spec: FlowReferred, materials: Materials) -> Callable[[TrainState], TrainState]:
    """A function that readies a state for a phase: what any algorithm needs, and the copies that this one keeps."""
    copies = copies_of(spec) if isinstance(spec, FlowGrouped) else {}
    ready = beginning(materials, keep_reference=refers(spec) and spec.reference == "start")

    def begin(state: TrainState) -> TrainState:
        state = ready(state)
        if not copies:
            return state
        made = {name: materials.shelves[name].put(ema_begin(masters_in(state))) for name in copies}
        return replace(
            state,
            snapshots={**state.snapshots, **made},
            controls={**state.controls, BEGAN: state.counters.optimizer_step},
        )

    return begin


def followed(state: TrainState, copies: Mapping[str, Forgetting], materials: Materials) -> TrainState:
    """The state with every copy nearer to the actor, by the optimizer steps that the phase has made."""
    made = updates_made(state)
    moved = {name: nearer(spec, state, name, made, materials.shelves[name]) for name, spec in copies.items()}
    return replace(state, snapshots={**state.snapshots, **moved})


def nearer(spec: Forgetting, state: TrainState, name: str, made: int, shelf: Shelf, role: str = ACTOR) -> Any:
    """The snapshot of a copy that is one step nearer to its role.

    Args:
        spec: how it follows.
        state: holds the copy as the snapshot `name`, and the role.
        made: how often the role has been moved since the copy was made.
        shelf: where the copy lies.
    """
    decay = ramped_decay(made, start=spec.start, flat=spec.flat, rate=spec.rate, cap=spec.cap)
    return shelf.put(ema_update(shelf.take(state.snapshots[name]), masters_in(state, role), decay))


def updates_made(state: TrainState) -> int:
    """Optimizer steps since a phase with copies began."""
    return state.counters.optimizer_step - int(state.controls[BEGAN])


def copy_of(state: TrainState, materials: Materials, name: str) -> Any:
    """What the policy takes with a copy, or the average, in the actor's place."""
    wide = materials.shelves[name].take(state.snapshots[name])
    return materials.view({**state.params, ACTOR: ema_params(wide, state.params[ACTOR])})


def drawing_params(spec: FlowGrouped, state: TrainState, materials: Materials) -> Any:
    """What draws, where no copy does: the actor, or its average."""
    if spec.draw_with == "ema":
        return copy_of(state, materials, AVERAGE)
    return (materials.drawn_with or materials.view)(state.params)


def scoring_params(spec: FlowGrouped, state: TrainState, materials: Materials) -> Any:
    """The same as training computes with it."""
    return copy_of(state, materials, AVERAGE) if spec.draw_with == "ema" else materials.view(state.params)


def lasting(state: TrainState, materials: Materials, updates: int) -> TrainState:
    """The state with parameters of the actor that so many updates leave as they are, even those that write to theirs."""
    if not materials.donate or updates < 2:
        return state
    return replace(state, params={**state.params, ACTOR: snapshot(state.params[ACTOR])})


def reference_of(spec: FlowReferred, state: TrainState, materials: Materials) -> Any:
    """The frozen parameters that are compared with: of the phase's start, or the model with adapters that add nothing."""
    if spec.reference == "start":
        return start_of(state, materials)
    return materials.view({**state.params, ACTOR: tree.map(torch.zeros_like, state.params[ACTOR])})
