"""The law of flow policies finds policies that do not keep it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flow_models import Field, parameters, prompts

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow import Process, Trajectory
from areno_fn.contracts.key import Key
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.testing import laws


def hold(policy: Any, process: Process = Process(), **options: Any) -> Trajectory:  # noqa: B008
    levels = noise_levels(4, () if process.dynamics == "ode" else None)
    given = prompts(negative=True)
    return laws.trajectory_matches_training(
        policy, parameters(), given, Key.of(0), process, flow_match(4), levels, **options
    )


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("dynamics", ["flow_sde", "dance_sde", "cps"])
def test_a_right_policy_keeps_the_law(dynamics: Any, guidance: float) -> None:
    assert hold(Field(), Process(dynamics=dynamics, guidance=guidance), samples=3).logp.shape == (9, 3)


class Averaging(Field):
    """Looks at the rest of the batch."""

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        return super().velocity(params, state, timestep, condition) + 0.01 * state.mean(0)


class Late(Field):
    """Looks at the rest of the batch in the last step, which adds no noise and is not scored."""

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        late = (timestep < 300).to(state.dtype)[:, None, None]
        return super().velocity(params, state, timestep, condition) + 0.01 * late * state.mean(0)


class Counting(Field):
    """Answers otherwise each time."""

    calls = 0

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        type(self).calls += 1
        return super().velocity(params, state, timestep, condition) * (1 + 1e-4 * type(self).calls)


class Training(Field):
    """Is not itself while gradients are taken."""

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        return super().velocity(params, state, timestep, condition) * (1.01 if torch.is_grad_enabled() else 1.0)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Averaging(), r"sigma \d.\d+: element \d+ was recorded as -?\d+.\d+, but in a batch of its own it is"),
        (Counting(), "in the batch of the rollout it is"),
        (Training(), "in the batch of the rollout it is"),
    ],
)
def test_a_wrong_policy_breaks_it(policy: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        hold(policy)


def test_a_sample_that_depends_on_its_batch_is_found_where_scores_do_not_show_it() -> None:
    with pytest.raises(
        AssertionError, match=r"final of prompt 10: element \d+ was recorded as .* but drawn alone it is"
    ):
        hold(Late())


def test_it_compares_something() -> None:
    with pytest.raises(RecordError, match="no step; name steps that the trajectory stored"):
        hold(Field(), Process(dynamics="ode"))
