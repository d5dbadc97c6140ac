"""`optimizer`: what a specification's entry, or a pair of functions of a user's own, becomes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.spec import AdamW8bitSpec, AdamWSpec, MuonSpec, OptimizerSpec, SGDSpec
from areno_fn.steps.optimizers.adam8bit import adamw8bit
from areno_fn.steps.optimizers.adamw import adamw
from areno_fn.steps.optimizers.chain import chain
from areno_fn.steps.optimizers.clip import clip_by_global_norm
from areno_fn.steps.optimizers.guard import guarded
from areno_fn.steps.optimizers.master import with_master
from areno_fn.steps.optimizers.muon import muon
from areno_fn.steps.optimizers.orthogonal import Placements
from areno_fn.steps.optimizers.sgd import sgd

Pair = tuple[Callable[..., Any], Callable[..., Any]]
"""`(init, update)` as optax writes it."""

_BUILDERS: dict[type, Callable[[Any, int, Placements | None], Optimizer]] = {
    AdamWSpec: adamw,
    AdamW8bitSpec: adamw8bit,
    SGDSpec: sgd,
    MuonSpec: muon,
}


def optimizer(spec: OptimizerSpec, total_steps: int, placements: Placements | None = None) -> Optimizer:
    """The optimizer of a specification.

    Args:
        total_steps: optimizer steps of the phase.
        placements: by path, how ranks share a leaf.
    """
    return _BUILDERS[type(spec)](spec, total_steps, placements)


def optimizer_from(given: Transform | Pair) -> Optimizer:
    """The optimizer that a user's `(init, update)` makes: its updates are added to float32 masters.

    The pair is everything that happens to a gradient, sign and learning rate included; nothing is clipped, and the
    norm of the gradient is reported. Its state is any tree of tensors that keeps structure, shapes and dtypes. Updates have
    the structure and the shapes of the parameters. An update that returns something else, or that writes to its
    parameters or to its old state, raises `RecordError`.

    Raises:
        SpecError: it is neither a `Transform` nor a pair of functions, or they do not take what they are given.
    """
    if not isinstance(given, Transform):
        if not (isinstance(given, tuple) and len(given) == 2 and all(map(callable, given))):
            raise SpecError(
                f"an optimizer of one's own is a Transform or a pair (init, update) of functions, not {type(given).__name__}"
            )
        given = Transform(init=given[0], update=given[1])
    return with_master(chain(clip_by_global_norm(math.inf), guarded(given)))
