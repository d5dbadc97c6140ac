"""`TrainState`: everything a run is. What is not in here does not survive, and nothing else may matter."""

from __future__ import annotations

from typing import Any

import attrs

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.execution import CycleUnit
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, replace


@record
class Counters:
    """Three independent clocks. None is ever derived from another.

    Attributes:
        optimizer_step: parameter updates made.
        rollout_iteration: generation cycles completed.
        data_epoch: traversals of a data set completed.
    """

    optimizer_step: int = 0
    rollout_iteration: int = 0
    data_epoch: int = 0

    def __check__(self) -> None:
        _natural(self, "optimizer_step", "rollout_iteration", "data_epoch")

    def advance_optimizer(self, steps: int = 1) -> Counters:
        """Adds `steps` >= 1 to the optimizer's clock and touches no other."""
        if isinstance(steps, bool) or steps < 1:
            raise RecordError(f"Counters.advance_optimizer: steps must be at least 1, received {steps!r}")
        return replace(self, optimizer_step=self.optimizer_step + steps)

    def advance_cycle(self, unit: CycleUnit) -> Counters:
        """Adds 1 to the clock of a completed cycle and touches no other."""
        name = unit.value
        return replace(self, **{name: getattr(self, name) + 1})


@record
class Cursor:
    """Where the run stands. Everything names what comes *next*, so that nothing is read twice or skipped.

    Attributes:
        phase: index of the current phase.
        step: steps of this phase already done.
        epoch: data epoch that the next batch belongs to, counted within the phase.
        batch: index of the next batch within that epoch.
        total: steps done over all phases.
    """

    phase: int = 0
    step: int = 0
    epoch: int = 0
    batch: int = 0
    total: int = 0

    def __check__(self) -> None:
        _natural(self, "phase", "step", "epoch", "batch", "total")


@record
class TrainState:
    """The whole state of a run; a step maps one of these to the next.

    Attributes:
        params: parameter tree per role, for example `{"actor": ...}`.
        optim: optimizer state per trainable role.
        snapshots: frozen parameter trees by name, for example `{"reference": ...}`.
        controls: numbers that a rule moves from step to step, by name, such as an adaptive coefficient.
        counters: the clocks.
        key: root of all randomness of the run; draws fold the clocks into it and never change it.
        cursor: phase, step and data position.
    """

    params: dict[str, Any]
    optim: dict[str, Any]
    snapshots: dict[str, Any]
    counters: Counters
    key: Key
    cursor: Cursor
    controls: dict[str, int | float] = attrs.field(factory=dict)


def _natural(value: object, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if type(number) is not int or number < 0:
            raise RecordError(f"{type(value).__name__}.{name} must be an integer of at least 0, received {number!r}")
