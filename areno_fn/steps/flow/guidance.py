"""Classifier-free guidance (arXiv 2207.12598): one function, used in sampling and in training alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.calls import is_a, received
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_policy import FlowPolicy, Led
from areno_fn.contracts.record import shown

Ask = Callable[[Any, torch.Tensor, torch.Tensor, Conditions], torch.Tensor]
"""`(params, state [B, *], timestep [B], conditions) -> velocity [B, *]`."""


_PARTS = ("latent_shape", "velocity", "guide")


def require_policy(policy: object) -> None:
    """Refuses what is no `FlowPolicy`, before a model is asked for anything.

    Raises:
        SpecError: names what is missing, or is of another form.
    """
    kind = policy.__name__ if isinstance(policy, type) else type(policy).__name__
    right = (
        "a FlowPolicy has latent_shape, a tuple, velocity(params, state, timestep, condition) and guide, for example "
        "areno_fn.contracts.flow.straight"
    )
    missing = [name for name in _PARTS if not hasattr(policy, name)]
    if missing:
        raise SpecError(f"the policy {kind} has no {missing[0]!r}; {right}")
    if isinstance(policy, type):
        raise SpecError(f"the policy {kind} is a class; make one of it, as in {kind}(...), since {right}")
    for name, arguments in (("velocity", 4), ("guide", 5)):
        part = getattr(policy, name)
        if not callable(part):
            raise SpecError(f"the {name} of the policy {kind} is {received(part)}; {right}")
        if not _takes(part, arguments):
            raise SpecError(f"the {name} of the policy {kind} cannot be called with {arguments} arguments; {right}")
    shape: object = policy.latent_shape  # type: ignore[attr-defined]
    if not isinstance(shape, tuple) or not all(is_a(size, int) and size > 0 for size in shape):
        raise SpecError(
            f"the latent_shape of the policy {kind} is {received(shape)}; it must be a tuple of sizes, (1, 8, 8)"
        )


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def guided(policy: FlowPolicy, scale: float) -> Ask:
    """The guided velocity, which `policy.guide` makes of v+ and v-; with a scale of 1 the model is asked for v+ alone.

    Both are asked for in one batch, the negative conditions first. A policy that is `Led` asks for itself.

    Args:
        policy: the model.
        scale: weight of guidance, at least 1.

    Raises:
        SpecError: it is no `FlowPolicy`.
        RecordError: from what is returned, where guidance has nothing to lead away from, or the model answers with anything
            but a velocity of the state's shape.
    """
    if not torch.compiler.is_compiling():
        require_policy(policy)
    led = policy.led if isinstance(policy, Led) else None

    def ask(params: Any, state: torch.Tensor, timestep: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        if scale == 1:
            return _answer(policy, params, state, timestep, conditions.positive)
        if conditions.negative is None:
            raise RecordError(f"guidance of {scale} needs Conditions.negative, but there are none")
        if led is not None:
            return _checked(
                policy, led(params, state, timestep, conditions.positive, conditions.negative, scale), state
            )
        both = tree.map(lambda a, b: torch.cat([a, b]), conditions.negative, conditions.positive)
        answer = _answer(policy, params, torch.cat([state, state]), torch.cat([timestep, timestep]), both)
        away, towards = answer.tensor_split(2)
        return policy.guide(towards, away, scale, state, timestep)

    return ask


def _answer(
    policy: FlowPolicy, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any
) -> torch.Tensor:
    return _checked(policy, policy.velocity(params, state, timestep, condition), state)


def _checked(policy: FlowPolicy, velocity: Any, state: torch.Tensor) -> torch.Tensor:
    if not isinstance(velocity, torch.Tensor) or velocity.shape != state.shape or not velocity.is_floating_point():
        raise RecordError(
            f"the velocity of the policy {type(policy).__name__} is {received(velocity)} at states {shown(state)}; it must be "
            f"floating and of their shape"
        )
    return velocity
