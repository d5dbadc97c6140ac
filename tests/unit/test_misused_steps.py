"""What steps, turns and values say when they are put together wrongly: one sentence with what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults.law_cases import PARAMS, POLICY, packed, state
from toy_policy import Attention
from typeguard import suppress_type_checks

from areno_fn.contracts.batch import Experience
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import AdamWSpec, Sampling
from areno_fn.contracts.valued import Valued
from areno_fn.steps.compose import accumulate, pipeline, train_step
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.optimizers import adamw
from areno_fn.steps.token.score import score
from areno_fn.steps.token.value import estimate, values_of
from areno_fn.steps.turns import Turn, in_turns

OBJECTIVE = pipeline(score(POLICY, Sampling()), cross_entropy())
STEP = train_step(OBJECTIVE, adamw(AdamWSpec(lr=1e-2), 10))


@pytest.mark.parametrize("given", [torch.ones(3), packed(), "abc", {"batch": packed()}, iter((packed(),))])
def test_micro_batches_come_in_a_tuple_or_a_list(given: Any) -> None:
    sentence = rf"a step takes a tuple or a list of micro-batches, received {type(given).__name__}; write \(batch,\)$"
    with suppress_type_checks(), pytest.raises(RecordError, match=sentence):
        STEP(state(), given)
    with suppress_type_checks(), pytest.raises(RecordError, match=sentence):
        accumulate(OBJECTIVE)(PARAMS, given)


def test_a_step_of_a_role_that_is_not_there_names_it() -> None:
    step = train_step(OBJECTIVE, adamw(AdamWSpec(lr=1e-2), 10), role="actr")
    with pytest.raises(
        RecordError, match="moves role 'actr', which is not in state.params; roles are actor, critic, judge$"
    ):
        step(state(), (packed(),))
    with pytest.raises(
        RecordError, match="moves role 'actor', which has no moments in state.optim; put optimizer.init"
    ):
        STEP(replace(state(), optim={}), (packed(),))


@pytest.mark.parametrize("repeats", [0, -1, 1.5, "2", True, None])
def test_a_turn_is_made_a_whole_number_of_times(repeats: Any) -> None:
    with suppress_type_checks(), pytest.raises(SpecError, match=f"at least once, received repeats={repeats!r}$"):
        Turn(STEP, repeats)


def test_turns_are_turns() -> None:
    with pytest.raises(SpecError, match=r"in_turns\(\) was given no turn; write in_turns\(Turn\(update\), \.\.\.\)$"):
        in_turns()
    for given in (STEP, [Turn(STEP)], None):
        sentence = rf"in_turns takes turns, received {type(given).__name__}; write Turn\(update\) around an update$"
        with suppress_type_checks(), pytest.raises(SpecError, match=sentence):
            in_turns(given)  # type: ignore[arg-type]
    with (
        suppress_type_checks(),
        pytest.raises(SpecError, match=r"a turn is made by a function \(state, batch\).*not by None$"),
    ):
        Turn(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [3, 0, 17])
def test_a_head_of_another_width_than_its_trunk_is_named(width: int) -> None:
    policy = Attention()
    made, params = packed(), policy.init()
    valued = Valued(trunk=params, head=torch.zeros(1, width))
    numbers = torch.zeros(made.targets.shape[0])
    batch = Experience(packed=made, old=numbers, advantage=numbers, values=numbers, returns=numbers)
    (_, hidden) = policy.hidden(params, made.tokens, made.positions, made.segments).shape
    assert hidden != width
    sentence = (
        rf"Valued.head is f32\[1,{width}\], but the trunk gives .* of width {hidden}; it must be \[1, {hidden}\]$"
    )
    with pytest.raises(RecordError, match=sentence):
        values_of(policy)(valued, made)
    with pytest.raises(RecordError, match=sentence):
        estimate(policy)(valued, batch)
