"""Flow matching by hand: wrong calls are told in one sentence what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_models import SHAPE, Field, numbers, parameters, prompts
from typeguard import suppress_type_checks

from areno_fn.contracts import flow, flow_policy
from areno_fn.contracts.errors import DataError, SpecError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.guidance import guided
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.path import noised
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.times import Times


class Unguided:
    """A policy without `guide`."""

    latent_shape = SHAPE

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        return state


def draw(given: FlowPrompts, schedule: Any = None, policy: Any = None, guidance: float = 1.0) -> object:
    rollout = flow_sampler(policy or Field(), Process(guidance=guidance))
    return rollout(
        parameters(), given, Key.of(0), flow_match(3) if schedule is None else schedule, noise_levels(3, None)
    )


def noise(rows: int, **more: Any) -> object:
    two = prompts(2)
    return noised(numbers("clean", rows, *SHAPE), two.conditions, torch.arange(3), Key.of(0), Times(), **more)


TWO, THREE = Conditions(positive=torch.tensor([3, 8])), torch.arange(3)
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "ids of a rollout": (
        lambda: draw(FlowPrompts(conditions=TWO, ids=THREE)),
        DataError,
        r"^conditions\.positive is i64\[2\], but there are 3 ids; give one row for every id$",
    ),
    "mask of a rollout": (
        lambda: draw(replace(prompts(3), mask=torch.ones(2, *SHAPE, dtype=torch.bool))),
        DataError,
        r"^mask is bool\[2,2,3\], but there are 3 ids; give one row for every id$",
    ),
    "ids of pictures": (lambda: noise(2), DataError, r"^clean is f32\[2,2,3\], but there are 3 ids; give one row"),
    "ids of labels": (lambda: noise(3), DataError, r"^conditions\.positive is f32\[2,4\], but there are 3 ids; give one"),
    "a bare schedule": (
        lambda: draw(prompts(2), torch.linspace(1, 0, 4)),
        SpecError,
        r"^the schedule is f32\[4\]; it must be a Schedule, as flow_match\(steps\) makes one",
    ),
    "a function that draws": (
        lambda: draw(prompts(2), policy=lambda params, state: state),
        SpecError,
        r"^the policy function has no 'latent_shape'; a FlowPolicy has latent_shape, a tuple, velocity\(params, state, ",
    ),
    "a function that is asked": (lambda: guided(sum, 1.0), SpecError, r"has no 'velocity'; a FlowPolicy has latent_shape"),  # type: ignore[arg-type]
    "no guide": (
        lambda: draw(prompts(2, negative=True), policy=Unguided(), guidance=2.0),
        SpecError,
        r"^the policy Unguided has no 'guide'; .* for example areno_fn\.contracts\.flow\.straight$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_what_is_right(name: str) -> None:
    call, kind, sentence = WRONG[name]
    with suppress_type_checks(), pytest.raises(kind, match=sentence):
        call()


def test_the_policy_is_where_the_records_are() -> None:
    assert flow.FlowPolicy is flow_policy.FlowPolicy and flow.straight is flow_policy.straight
