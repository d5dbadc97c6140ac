"""Distribution matching with roles that take turns: who moves, who stays, and where the generator ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.flow_match import Judges
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.compose import pipeline, train_step
from areno_fn.steps.flow.match import followed, match
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.distribution import dmd2, trajectory_matching
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import predict
from areno_fn.steps.flow.replay import replays
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.times import Times
from areno_fn.steps.optimizers import adamw

REAL_MEAN, REAL_STD = 0.5, 0.7


class Gaussian:
    """The exact velocity of numbers from N(mean, std^2), and near pure noise a line of its own, by which one step can sample."""

    latent_shape = (1,)
    guide = staticmethod(straight)

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        sigma = (timestep / 1000)[:, None]
        spread = (1 - sigma) * params["std"].square()
        share = spread / ((1 - sigma) * spread + sigma.square())
        clean = params["mean"] + share * (state - (1 - sigma) * params["mean"])
        near = (sigma > 0.999).to(state.dtype)
        return (state - clean) / sigma - near * (params["slope"] * state + params["shift"])


def parameters(mean: float, std: float, slope: float = 0.0) -> dict[str, torch.Tensor]:
    return {k: torch.tensor([v]) for k, v in {"mean": mean, "std": std, "slope": slope, "shift": 0.0}.items()}


POLICY = Gaussian()
OPTIMIZERS = {
    role: adamw(AdamWSpec(lr=lr, betas=(0.9, 0.99)), 1000) for role, lr in {"generator": 0.03, "fake": 0.1}.items()
}
SAMPLE = flow_sampler(POLICY, Process(dynamics="ode"))
LEVELS = Times(low=0.05, high=0.95)


def begun() -> TrainState:
    params = {
        "generator": parameters(-0.5, 0.3, slope=0.2),
        "fake": parameters(-0.5, 0.3),
        "real": parameters(REAL_MEAN, REAL_STD),
    }
    optim = {role: optimizer.init(params[role]) for role, optimizer in OPTIMIZERS.items()}
    return TrainState(params=params, optim=optim, snapshots={}, counters=Counters(), key=Key.of(1), cursor=Cursor())


def judges(params: Any) -> Judges:
    return Judges(generator=params["generator"], real=params["real"], fake=params["fake"])


LOSSES: dict[str, tuple[Any, Any, str]] = {
    "dmd2": (dmd2(), velocity_matching(), "anywhere"),
    "tdm": (trajectory_matching(huber=0.0), velocity_matching("data", snr_cap=5.0), "above"),
}


def turns(name: str) -> tuple[Callable[..., tuple[TrainState, Metrics]], Callable[..., tuple[TrainState, Metrics]]]:
    """Updates of the follower and of the generator, each on a fresh rollout of one step."""
    loss, following, query = LOSSES[name]
    lead = train_step(
        pipeline(match(POLICY), loss), OPTIMIZERS["generator"], role="generator", view=judges, prefix="generator"
    )
    follow = train_step(pipeline(predict(POLICY), following), OPTIMIZERS["fake"], role="fake", prefix="fake")

    def rolled(state: TrainState, key: Key, rows: int) -> Any:
        labels = torch.zeros(rows)
        given = FlowPrompts(conditions=Conditions(positive=labels), ids=torch.arange(rows))
        drawn = SAMPLE(state.params["generator"], given, key.fold("draw"), flow_match(1), noise_levels(1, ()), keep=[0])
        return replays(drawn, key.fold("query"), LEVELS, query=query)

    def move_fake(state: TrainState, key: Key, rows: int = 128) -> tuple[TrainState, Metrics]:
        batches = tuple(followed(POLICY, state.params["generator"], b) for b in rolled(state, key, rows))
        return follow(state, batches)

    def move_generator(state: TrainState, key: Key, rows: int = 128) -> tuple[TrainState, Metrics]:
        return lead(state, rolled(state, key, rows))

    return move_fake, move_generator


@pytest.mark.parametrize("name", LOSSES)
def test_a_turn_moves_its_role_alone(name: str) -> None:
    state = begun()
    for move, role in zip(turns(name), ("fake", "generator"), strict=True):
        after, _ = move(state, Key.of(3), 8)
        for other in ("generator", "fake", "real"):
            assert tree.equal(after.params[other], state.params[other]) == (other != role)
        assert [r for r in after.optim if not tree.equal(after.optim[r], state.optim[r])] == [role]
        assert tree.equal(after.counters, Counters(optimizer_step=1))
        assert tree.equal(after.key, state.key)


@pytest.mark.parametrize("name", LOSSES)
def test_where_fake_is_real_the_generator_stands_still(name: str) -> None:
    state = begun()
    state = replace(state, params={**state.params, "fake": state.params["real"]})
    after, metrics = turns(name)[1](state, Key.of(3), 8)
    assert tree.equal(after.params, state.params) and metrics["generator/grad_norm"] == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_the_generator_learns_the_distribution_of_the_teacher(name: str) -> None:
    """From N(-.5, .2^2) in one step to N(.5, .7^2), both the mean and the spread, on average over the second half."""
    state, (follow, lead) = begun(), turns(name)
    reached = []
    for number in range(80):
        key = state.key.fold(number)
        for turn in range(2):
            state, _ = follow(state, key.fold("fake").fold(turn))
        state, _ = lead(state, key.fold("generator"))
        generator = state.params["generator"]
        reached.append(torch.cat([generator["mean"] + generator["shift"], generator["slope"].abs()]))
    mean, std = torch.stack(reached[40:]).mean(0).tolist()
    assert mean == pytest.approx(REAL_MEAN, abs=0.1) and std == pytest.approx(REAL_STD, abs=0.1)
