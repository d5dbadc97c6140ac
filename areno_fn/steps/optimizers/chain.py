"""`chain`: transforms applied one after the other; `reports`: what their states have to tell."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from areno_fn.contracts.optim import Transform


@runtime_checkable
class Reporting(Protocol):
    """The state of a transform that has something to report."""

    def report(self) -> dict[str, torch.Tensor]:
        """Named scalar tensors, by the names of the metric table."""
        ...


def chain(*transforms: Transform) -> Transform:
    """The transform that hands the updates through all of them in order. Its state is the tuple of theirs."""

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, tuple[Any, ...]]:
        states = []
        for transform, own in zip(transforms, state, strict=True):
            updates, own = transform.update(updates, own, params)
            states.append(own)
        return updates, tuple(states)

    return Transform(init=init, update=update)


def reports(state: Any) -> dict[str, torch.Tensor]:
    """What the states in a chain's state report, taken together."""
    if isinstance(state, Reporting):
        return state.report()
    found: dict[str, torch.Tensor] = {}
    for part in state if isinstance(state, tuple) else ():
        found |= reports(part)
    return found
