"""Several roles in one update: each takes its turns, in order, and touches nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.state import TrainState
from areno_fn.steps.token.report import mean_metrics

Update = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""`(state, batch) -> (state, metrics)`, as `train_step` makes it."""


@attrs.frozen
class Turn:
    """An update of one role, made some number of times in a row.

    Attributes:
        update: what `train_step` returned.
        repeats: how often, at least 1.
    """

    update: Update
    repeats: int = 1

    def __attrs_post_init__(self) -> None:
        if not callable(self.update):
            raise SpecError(
                f"a turn is made by a function (state, batch), such as train_step makes, not by {self.update!r}"
            )
        if type(self.repeats) is not int or self.repeats < 1:
            raise SpecError(f"a turn is made a whole number of times, at least once, received repeats={self.repeats!r}")


def in_turns(*turns: Turn) -> Update:
    """One update made of several roles' updates, on the same batch.

        update = in_turns(Turn(critic_update, repeats=4), Turn(actor_update))

    Metrics of repeats are combined by `mean_metrics`; two turns may not report one name.

    Raises:
        SpecError: there is no turn, or something else in its place.
    """
    if not turns:
        raise SpecError("in_turns() was given no turn; write in_turns(Turn(update), ...)")
    for turn in turns:
        if not isinstance(turn, Turn):
            raise SpecError(
                f"in_turns takes turns, received {type(turn).__name__}; write Turn(update) around an update"
            )

    def update(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        metrics: Metrics = {}
        for turn in turns:
            state, told = _repeated(turn, state, batch)
            twice = sorted(told.keys() & metrics.keys())
            if twice:
                raise RecordError(f"two turns report {twice[0]!r}; give train_step another `prefix` for one of them")
            metrics |= told
        return state, metrics

    return update


def _repeated(turn: Turn, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    reported: Sequence[Metrics] = []
    for _ in range(turn.repeats):
        state, metrics = turn.update(state, batch)
        reported = [*reported, metrics]
    return state, mean_metrics(reported)
