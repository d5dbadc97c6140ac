"""Iterations of every algorithm of flow models on a velocity of seven numbers, so small that thousands are made in seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow import Conditions, FlowPrompts, Trajectory
from areno_fn.contracts.flow_batch import Clean, EachReward, JudgedTrajectory
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.spec import EMA, SGDSpec
from areno_fn.steps.recipes import Losses, Materials, Teaching, build

KEY = af.Key.of(8)
ITERATIONS = 2
WEIGHTS = (1.0, 0.7)
SETS = ("a", "b")
AVERAGE = EMA(decay=0.5, schedule="constant")


class Bent:
    """A velocity on a plane, of three conditions and of none, that is no line in anything it depends on."""

    latent_shape = (2,)
    guide = staticmethod(straight)

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        bent = torch.tanh(params["a"] * state + params["b"] * (timestep / 1000)[:, None])
        return bent + params["c"][condition][:, None]


POLICY = Bent()


def parameters(scale: float) -> dict[str, torch.Tensor]:
    return {
        "a": scale * torch.tensor([0.8]),
        "b": scale * torch.tensor([-0.5, 0.9]),
        "c": scale * torch.tensor([0.3, -0.4, 0.6, 0.1]),
    }


def seen(params: Any) -> Any:
    """What the policy takes, as of adapters: a base that stays, and what is trained beside it."""
    return tree.map(lambda own, base: own + base, params["actor"], parameters(0.3))


def prompts(count: int = 4) -> FlowPrompts:
    conditions = Conditions(positive=torch.arange(count) % 3, negative=torch.full((count,), 3))
    return FlowPrompts(conditions=conditions, ids=torch.arange(count))


def batch_of(algorithm: af.Algorithm, state: af.TrainState, kind: Any) -> Any:
    """What a step is given: pictures, what was drawn, or what was drawn with two rewards."""
    if algorithm.sample is None:
        latents = af.random.normal(KEY.fold("data"), torch.arange(8)).reshape(4, 2)
        return Clean(latents=latents, prompts=prompts())
    drawn = algorithm.sample(state, prompts())
    assert isinstance(drawn, Trajectory)
    if kind.execution.feedback == "none":
        return drawn
    seen = drawn.final.nan_to_num()
    values = torch.stack([seen[:, 0].tanh(), seen.prod(1).tanh()], 1)
    each = EachReward(values=values, weights=torch.tensor(WEIGHTS), applies=torch.ones(values.shape, dtype=torch.bool))
    return JudgedTrajectory(rollout=drawn, rewards=values @ torch.tensor(WEIGHTS), each=each)


def told(spec: Any, losses: Losses | None = None) -> bytes:
    """A digest of all that some iterations leave: what was drawn, metrics, and every number of every state.

    Raises:
        SpecError: the algorithm cannot be composed.
    """
    materials = Materials(
        policy=POLICY,
        optimizers={
            role: af.sgd(SGDSpec(lr=0.5, momentum=0.0, max_grad_norm=0.0, weight_decay=0.0), 100) for role in spec.roles
        },
        view=seen,
        ema=AVERAGE,
        teachers={"folder": Teaching(role="teacher", policy=POLICY), "other": Teaching(role="other", policy=POLICY)},
        sources=(SETS[0], SETS[1], SETS[0], SETS[1]),
    )
    algorithm = build(spec, materials, losses)
    params = {"actor": parameters(0.7), "teacher": parameters(0.6), "other": parameters(-0.3)}
    state = algorithm.begin(
        af.TrainState(params=params, optim={}, snapshots={}, counters=af.Counters(), key=KEY, cursor=af.Cursor())
    )
    found = hashlib.sha256()
    for number in range(ITERATIONS):
        state = af.replace(state, cursor=af.Cursor(step=number))
        batch = batch_of(algorithm, state, type(spec))
        state, metrics = algorithm.step(state, batch)
        for leaf in _numbers(batch, state):
            found.update(leaf.detach().contiguous().numpy().tobytes())
        found.update(repr(sorted(metrics.items())).encode())
        found.update(repr(sorted(state.controls.items())).encode())
    return found.digest()


def _numbers(batch: Any, state: af.TrainState) -> Iterator[torch.Tensor]:
    yield from tree.leaves(batch)
    for part in (state.params, state.snapshots):
        for name in sorted(part):
            yield from tree.leaves(part[name])
