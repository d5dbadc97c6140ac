"""Flow matching by hand: wrong calls are told in one sentence what would be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from flow_models import SHAPE, Field, numbers, parameters, prompts
from typeguard import suppress_type_checks

from areno_fn import random
from areno_fn.contracts import flow, flow_policy
from areno_fn.contracts.calls import checked, is_a, received, words_of
from areno_fn.contracts.errors import ArenoError, DataError, ModelError, RecordError, SpecError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.model import DiTPolicy, init
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import pipeline, train_step
from areno_fn.steps.flow.guidance import guided
from areno_fn.steps.flow.match import match
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.replay import replays
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match, late, scheduled
from areno_fn.steps.flow.score import act_flow, denoising, move, recall
from areno_fn.steps.flow.times import Grid, Times
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.optimizers import adamw

KEY = Key.of(0)
TWO, THREE = Conditions(positive=torch.tensor([3, 8])), torch.arange(3)
LEVELS = noise_levels(3, None)
DRAWN = flow_sampler(Field(), Process())(parameters(), prompts(2), KEY, flow_match(3), LEVELS)
NOISED = noised(numbers("clean", 2, *SHAPE), prompts(2).conditions, torch.arange(2), KEY, Times())
OPTIMIZER = adamw(AdamWSpec(lr=1e-3), 10)
PREDICTED = pipeline(predict(Field()), velocity_matching())
ACTED = pipeline(act_flow(Field()), clipped())
STATE = TrainState(
    params={"actor": parameters()},
    optim={"actor": OPTIMIZER.init(parameters())},
    snapshots={},
    counters=Counters(),
    key=KEY,
    cursor=Cursor(),
)


def but(**parts: Any) -> Any:
    """A policy that is right but for these parts."""
    return type("Own", (Field,), parts)()


class Unguided:
    """A policy without `guide`."""

    latent_shape = SHAPE

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        return state


def draw(given: Any = None, schedule: Any = None, policy: Any = None, levels: Any = LEVELS, **more: Any) -> object:
    rollout = flow_sampler(policy or Field(), Process())
    given = prompts(2) if given is None else given
    return rollout(parameters(), given, KEY, flow_match(3) if schedule is None else schedule, levels, **more)


def noise(rows: int = 2, ids: Any = None, key: Any = KEY, times: Any = None, clean: Any = None, **more: Any) -> object:
    shown = numbers("clean", rows, *SHAPE) if clean is None else clean
    names = torch.arange(2) if ids is None else ids
    return noised(shown, prompts(2).conditions, names, key, Times() if times is None else times, **more)


Wrong = dict[str, tuple[Callable[[], object], type[Exception], str]]
RIGHT = (
    r"; a FlowPolicy has latent_shape, a tuple, velocity\(params, state, timestep, condition\) and guide, for example"
)
POLICIES: Wrong = {
    "a function that draws": (
        lambda: draw(policy=lambda params, state: state),
        SpecError,
        r"^the policy function has no 'latent_shape'" + RIGHT,
    ),
    "a function that is asked": (lambda: guided(sum, 1.0), SpecError, "has no 'latent_shape'" + RIGHT),  # type: ignore[arg-type]
    "no guide": (
        lambda: flow_sampler(Unguided(), Process()),  # type: ignore[arg-type]
        SpecError,
        r"^the policy Unguided has no 'guide'; .* for example areno_fn\.contracts\.flow\.straight$",
    ),
    "a class": (
        lambda: flow_sampler(Field, Process()),  # type: ignore[arg-type]
        SpecError,
        r"^the policy Field is a class; make one of it, as in Field\(\.\.\.\), since",
    ),
    "a list of sizes": (
        lambda: draw(policy=but(latent_shape=[2, 3])),
        SpecError,
        r"^the latent_shape of the policy Own is the list \[2, 3\]; it must be a tuple of sizes, \(1, 8, 8\)$",
    ),
    "a size": (lambda: draw(policy=but(latent_shape=8)), SpecError, "^the latent_shape of the policy Own is 8; it must"),
    "no function": (lambda: draw(policy=but(velocity="v")), SpecError, "^the velocity of the policy Own is 'v'" + RIGHT),
    "two arguments": (
        lambda: draw(policy=but(velocity=lambda self, state: state)),
        SpecError,
        "^the velocity of the policy Own cannot be called with 4 arguments" + RIGHT,
    ),
    "another shape": (
        lambda: draw(policy=but(velocity=lambda self, params, state, timestep, condition: state[:, 0])),
        RecordError,
        r"^the velocity of the policy Own is f32\[2,3\] at states f32\[2,2,3\]; it must be floating and of their shape$",
    ),
    "a pair": (
        lambda: draw(policy=but(velocity=lambda self, params, state, timestep, condition: (state,))),
        RecordError,
        r"^the velocity of the policy Own is the tuple \(f32\[2,2,3\]\) at states",
    ),
    "whole numbers": (
        lambda: draw(policy=but(velocity=lambda self, params, state, timestep, condition: state.long())),
        RecordError,
        r"is i64\[2,2,3\] at states f32\[2,2,3\]; it must be floating",
    ),
}  # fmt: skip
ROLLOUTS: Wrong = {
    "ids of a rollout": (
        lambda: draw(FlowPrompts(conditions=TWO, ids=THREE)),
        DataError,
        r"^conditions\.positive is i64\[2\], but there are 3 ids; give a tensor with one row for every id$",
    ),
    "conditions in a list": (
        lambda: draw(FlowPrompts(conditions=Conditions(positive=[3, 8]), ids=torch.arange(2))),
        DataError,
        r"^conditions\.positive\.0 is 3, but there are 2 ids; give a tensor with one row for every id$",
    ),
    "mask of a rollout": (
        lambda: draw(replace(prompts(3), mask=torch.ones(2, *SHAPE, dtype=torch.bool))),
        DataError,
        r"^mask is bool\[2,2,3\], but there are 3 ids; give a tensor with one row for every id$",
    ),
    "mask of another shape": (
        lambda: draw(replace(prompts(2), mask=torch.ones(2, 2, 1, dtype=torch.bool))),
        DataError,
        r"^a mask of latents must be bool \['B', 2, 3\], received bool\[2,2,1\]$",
    ),
    "a mask of numbers": (lambda: draw(replace(prompts(2), mask=torch.ones(2, *SHAPE))), DataError, r"f32\[2,2,3\]$"),
    "ids with a point": (
        lambda: replace(prompts(2), ids=torch.ones(2)),
        RecordError,
        r"^FlowPrompts\.ids are whole numbers, the name of each prompt, received f32\[2\]$",
    ),
    "labels alone": (lambda: draw(THREE), RecordError, r"^rollout: prompts must be a FlowPrompts, received i64\[3\]$"),
    "conditions alone": (lambda: draw(TWO), RecordError, "^rollout: prompts must be a FlowPrompts, received a Conditions$"),
    "a bare schedule": (
        lambda: draw(schedule=torch.linspace(1, 0, 4)),
        RecordError,
        r"^rollout: schedule must be a Schedule, received f32\[4\]$",
    ),
    "one level": (lambda: draw(levels=0.7), RecordError, "^rollout: levels must be a Tensor, received 0.7$"),
    "endless levels": (
        lambda: draw(levels=torch.tensor([0.5, torch.nan, 0.0])),
        SpecError,
        r"^noise levels are finite and at least 0, received \[0.5, nan, 0.0\]$",
    ),
    "half a sample": (lambda: draw(samples=1.5), RecordError, "^rollout: samples must be a whole number, received 1.5$"),
    "a step": (
        lambda: draw(keep=1),
        RecordError,
        "^rollout: keep must be a sequence, of which each is a whole number or None, received 1$",
    ),
    "a name for a dtype": (lambda: draw(dtype="float32"), RecordError, "^rollout: dtype must be a dtype, received 'float32'$"),
    "a name for a process": (
        lambda: flow_sampler(Field(), "ode"),  # type: ignore[arg-type]
        RecordError,
        "^flow_sampler: process must be a Process, received 'ode'$",
    ),
    "a text for a guidance": (
        lambda: Process(guidance="2"),  # type: ignore[arg-type]
        SpecError,
        "^Process: guidance must be a number, received '2'$",
    ),
}  # fmt: skip
DATA: Wrong = {
    "ids of pictures": (
        lambda: noise(ids=THREE),
        DataError,
        r"^clean is f32\[2,2,3\], but there are 3 ids; give a tensor with one row for every id$",
    ),
    "ids of labels": (lambda: noise(3, ids=THREE), DataError, r"^conditions\.positive is f32\[2,4\], but there are 3 ids"),
    "ids in a list": (lambda: noise(ids=[0, 1]), RecordError, r"^noised: ids must be a Tensor, received the list \[0, 1\]$"),
    "ids with a point": (lambda: noise(ids=torch.ones(2)), DataError, r"^ids are a vector of whole numbers, .*f32\[2\]$"),
    "bytes": (
        lambda: noise(clean=torch.zeros(2, *SHAPE, dtype=torch.uint8)),
        DataError,
        r"^clean latents are floating numbers, received u8\[2,2,3\]; pictures are from -1 to 1, not to 255$",
    ),
    "an array": (lambda: noise(clean=numbers("c", 2).numpy()), RecordError, "clean must be a Tensor, received a ndarray$"),
    "a mask of numbers": (lambda: noise(mask=torch.ones(2, *SHAPE)), DataError, r"of type bool, received f32\[2,2,3\]$"),
    "a name for times": (lambda: noise(times="uniform"), RecordError, "times must be a Times or a Grid, received 'uniform'$"),
    "a seed": (lambda: noise(key=0), RecordError, "^noised: key must be a Key, received 0$"),
    "no level": (lambda: noise(terms=0), DataError, "^every sample is noised to at least one level, received terms=0$"),
    "half a level": (lambda: noise(terms=1.0), RecordError, "^noised: terms must be a whole number, received 1.0$"),
    "steps in words": (lambda: flow_match("6"), RecordError, "^flow_match: steps must be a whole number, received '6'$"),  # type: ignore[arg-type]
    "a list of levels": (
        lambda: scheduled([1.0, 0.5]),  # type: ignore[arg-type]
        RecordError,
        r"^scheduled: levels must be a Tensor, received the list \[1.0, 0.5\]$",
    ),
    "rising levels": (
        lambda: scheduled(torch.tensor([0.5, 1.0])),
        SpecError,
        r"^a schedule has falling noise levels \[T\], at most 1 and above 0, received \[0.5, 1.0\]$",
    ),
    "timesteps": (lambda: scheduled(torch.tensor([1000.0, 500.0])), SpecError, r"received \[1000.0, 500.0\]$"),
    "levels of two": (lambda: scheduled(torch.ones(3, 3)), SpecError, r"received f32\[3,3\]$"),
    "a strength in words": (lambda: late(flow_match(4), "0.5"), RecordError, "strength must be a number, received '0.5'$"),  # type: ignore[arg-type]
    "no steps": (lambda: noise_levels(0, None), SpecError, "^noise levels are those of at least one step, received steps=0$"),
    "one noisy step": (lambda: noise_levels(6, 3), RecordError, "^noise_levels: noisy must be a sequence, .* received 3$"),  # type: ignore[arg-type]
    "a shift in words": (lambda: Times(shift="3"), SpecError, "^Times: shift must be a number, received '3'$"),  # type: ignore[arg-type]
    "a grid of a number": (lambda: Grid(schedule=6), SpecError, "^Grid: schedule must be a Schedule, received 6$"),  # type: ignore[arg-type]
    "places in a list": (
        lambda: random.normal(KEY, [0, 1]),  # type: ignore[arg-type]
        RecordError,
        r"^coordinates of draws are tensors of integers, received \[0, 1\]$",
    ),
    "a draw of a seed": (
        lambda: random.normal(0, THREE),  # type: ignore[arg-type]
        RecordError,
        r"^draws are functions of a Key, as Key.of\(0\) makes one, received 0$",
    ),
}  # fmt: skip
UPDATES: Wrong = {
    "advantages in a list": (
        lambda: denoising(DRAWN, [1.0, 2.0]),  # type: ignore[arg-type]
        RecordError,
        r"^denoising: advantages must be a Tensor, received the list \[1.0, 2.0\]$",
    ),
    "a column": (
        lambda: denoising(DRAWN, torch.ones(2, 1)),
        RecordError,
        r"^advantages is f32\[2,1\], but the trajectory has 2 rows; give one floating number for each$",
    ),
    "whole advantages": (lambda: denoising(DRAWN, THREE[:2]), RecordError, r"^advantages is i64\[2\], but the trajectory"),
    "weights": (lambda: denoising(DRAWN, torch.ones(2), weight=torch.ones(3)), RecordError, r"^weight is f32\[3\], but"),
    "latents": (
        lambda: denoising(DRAWN.final, torch.ones(2)),  # type: ignore[arg-type]
        RecordError,
        r"^denoising: trajectory must be a Trajectory, received f32\[2,2,3\]$",
    ),
    "rows by a mask": (
        lambda: denoising(DRAWN, torch.ones(2), rows=torch.ones(2, dtype=torch.bool)),
        RecordError,
        r"^rows are named by a vector of int64, received bool\[2\]$",
    ),
    "a row too many": (
        lambda: denoising(DRAWN, torch.ones(2), rows=torch.tensor([1, 2])),
        RecordError,
        "^rows names row 2, but the trajectory has 2 rows, numbered from 0$",
    ),
    "a row before the first": (
        lambda: denoising(DRAWN, torch.ones(2), rows=torch.tensor([-3])),
        RecordError,
        "^rows names row -3, but the trajectory has 2 rows, numbered from 0$",
    ),
    "less than a row": (lambda: denoising(DRAWN, torch.ones(2), micro=-1), RecordError, "most rows of a micro-batch, received -1"),
    "rewards in a list": (lambda: group_advantages([1.0], THREE), RecordError, "rewards must be a Tensor, received the list"),  # type: ignore[arg-type]
    "a bound in words": (lambda: clipped("1", 1), RecordError, "^clipped: low must be a number, received '1'$"),  # type: ignore[arg-type]
    "a weighting": (lambda: velocity_matching(3), RecordError, "^velocity_matching: weighting must be a text, received 3$"),  # type: ignore[arg-type]
    "steps to predict": (
        lambda: train_step(PREDICTED, OPTIMIZER)(STATE, denoising(DRAWN, torch.ones(2))),
        RecordError,
        r"^a model predicts the velocities of a Noised, as noised\(\.\.\.\) makes it, received a Denoising$",
    ),
    "latents to score": (
        lambda: train_step(ACTED, OPTIMIZER)(STATE, NOISED),
        RecordError,
        r"^a model scores the steps of a Denoising, as denoising\(\.\.\.\) makes it, received a Noised$",
    ),
    "latents to take again": (
        lambda: match(Field())(None, NOISED[0]),  # type: ignore[arg-type]
        RecordError,
        r"^a model takes again the steps of a Replay, as replays\(\.\.\.\) makes it, received a Noised$",
    ),
    "no trajectory": (lambda: replays(THREE, KEY, Times()), RecordError, "^replays: trajectory must be a Trajectory"),  # type: ignore[arg-type]
    "parameters alone": (
        lambda: train_step(PREDICTED, OPTIMIZER)(parameters(), NOISED),  # type: ignore[arg-type]
        RecordError,
        "^a step takes a TrainState and micro-batches, received a dict for the state$",
    ),
    "settings": (
        lambda: train_step(PREDICTED, AdamWSpec()),  # type: ignore[arg-type]
        RecordError,
        "^train_step: optimizer must be an Optimizer, received an AdamWSpec$",
    ),
    "a dict": (lambda: adamw({"lr": 1}, 10), RecordError, "^adamw: spec must be an AdamWSpec, received a dict$"),  # type: ignore[arg-type]
}  # fmt: skip
MODELS: Wrong = {
    "layers in words": (
        lambda: DiTConfig(num_layers="2"),  # type: ignore[arg-type]
        SpecError,
        "^DiTConfig: num_layers must be a whole number, received '2'$",
    ),
    "a policy of a dict": (lambda: DiTPolicy({}), SpecError, "^DiTPolicy: config must be a DiTConfig, received a dict$"),  # type: ignore[arg-type]
    "a seed": (lambda: init(DiTConfig(), 0), RecordError, "^init: key must be a Key, received 0$"),  # type: ignore[arg-type]
    "a state": (
        lambda: DiTPolicy(DiTConfig()).velocity(STATE, torch.zeros(2, 1, 8, 8), torch.ones(2), TWO.positive),  # type: ignore[arg-type]
        ModelError,
        r"^this model takes its parameters, a DiT, received a TrainState; of a state give params\['actor'\]$",
    ),
}  # fmt: skip
WRONG = {
    f"{group}: {name}": case
    for group, cases in {
        "policies": POLICIES,
        "rollouts": ROLLOUTS,
        "data": DATA,
        "updates": UPDATES,
        "models": MODELS,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_what_is_right(name: str) -> None:
    call, kind, sentence = WRONG[name]
    with suppress_type_checks(), pytest.raises(ArenoError, match=sentence) as caught:
        call()
    assert type(caught.value) is kind and "\n" not in str(caught.value)


@pytest.mark.parametrize("lacks", ["latent_shape", "velocity", "guide"])
@pytest.mark.parametrize("build", [act_flow, move, predict, match, lambda own: flow_sampler(own, Process())])
def test_a_policy_that_lacks_a_part_is_refused_before_anything_is_computed(
    build: Callable[[Any], object], lacks: str
) -> None:
    parts = {"latent_shape": SHAPE, "velocity": Field.velocity, "guide": staticmethod(flow.straight)}
    own = type("Own", (), {name: part for name, part in parts.items() if name != lacks})()
    with suppress_type_checks(), pytest.raises(SpecError, match=f"^the policy Own has no '{lacks}'" + RIGHT):
        build(own)
    batch = denoising(DRAWN, torch.ones(2))[0]
    for asked in (lambda: recall(own, batch, before={}), lambda: remember(own, NOISED[0], old={})):
        with suppress_type_checks(), pytest.raises(SpecError, match=f"^the policy Own has no '{lacks}'" + RIGHT):
            asked()


def test_a_teacher_is_a_policy_too() -> None:
    with suppress_type_checks(), pytest.raises(SpecError, match="^the policy Unguided has no 'guide'"):
        match(Field(), real=Unguided())  # type: ignore[arg-type]


def test_the_policy_is_where_the_records_are() -> None:
    assert flow.FlowPolicy is flow_policy.FlowPolicy and flow.straight is flow_policy.straight


@pytest.mark.parametrize(
    ("value", "hint", "right"),
    [
        (1, int, True), (True, int, False), (1.0, int, False), (1, float, True), ("1", float, False), (None, None, True),
        (1, int | None, True), (None, int | None, True), ("a", int | None, False), ([1, 2], Sequence[int], True),
        ((1, 2.5), Sequence[int], False), ("ab", Sequence[str], False), (torch.ones(1), torch.Tensor, True),
        (3, Any, True), (len, Callable[..., Any], True), (3, Callable[..., Any], False), ({}, dict[str, int], True),
        (Field(), flow.FlowPolicy, True), (3, flow.FlowPolicy, True),
    ],
)  # fmt: skip
def test_what_is_of_a_type(value: Any, hint: Any, right: bool) -> None:
    assert is_a(value, hint) is right


def test_values_and_types_in_words() -> None:
    assert words_of(float | None) == "a number or None" and words_of(Callable[[int], int]) == "a function"
    assert words_of(Process) == "a Process" and words_of(AdamWSpec) == "an AdamWSpec"
    assert received([1] * 3) == "the list [3 x 1]" and received(list(range(99))) == "a list"
    assert received(len) == "the builtin_function_or_method len" and received(Field) == "the class Field"
    assert received(TWO) == "a Conditions" and received(None) == "None"


def test_a_checked_function_stays_what_it_was() -> None:
    def doubled(x: float, *, times: int = 2) -> float:
        """Doubles."""
        return x * times

    whole = checked(doubled)
    assert whole(3) == 6 and whole(3.5, times=4) == 14 and whole.__doc__ == "Doubles." and whole.__name__ == "doubled"
    with (
        suppress_type_checks(),
        pytest.raises(RecordError, match="^doubled: times must be a whole number, received 'a'$"),
    ):
        whole(3, times="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'once'"):
        whole(3, once=1)  # type: ignore[call-arg]
