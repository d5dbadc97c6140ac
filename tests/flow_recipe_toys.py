"""Named algorithms of flow models on a tiny DiT of three classes, whose label 3 is no class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow import Conditions, FlowPrompts
from areno_fn.contracts.flow_batch import Clean, JudgedTrajectory
from areno_fn.contracts.spec import SGDSpec
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.model import DiTPolicy, init
from areno_fn.steps.recipes import Algorithm, Materials, build

POLICY = DiTPolicy(DiTConfig(num_classes=3, sample_size=4, num_layers=1, num_heads=2, head_dim=8))
KEY = af.Key.of(5)
MOVED = SGDSpec(lr=0.1, max_grad_norm=0.0, weight_decay=0.0)


def start() -> Any:
    """Parameters of a velocity that is not 0."""
    params = init(POLICY.config, KEY)
    return tree.map_with_path(
        lambda path, x: x + 0.1 * af.random.normal(KEY.fold(path), torch.arange(x.numel())).reshape(x.shape), params
    )


def state_of(algorithm: Algorithm) -> af.TrainState:
    return algorithm.begin(
        af.TrainState(
            params={"actor": start()}, optim={}, snapshots={}, counters=af.Counters(), key=KEY, cursor=af.Cursor()
        )
    )


def made(spec: Any, optimizer: Any = None, loss: Any = None, *, donate: bool = False) -> Algorithm:
    movers: Mapping[str, Any] = {"actor": optimizer or af.sgd(MOVED, 10)}
    return build(spec, Materials(policy=POLICY, optimizers=movers, donate=donate), loss)


def clean(count: int = 6) -> Clean:
    latents = af.random.normal(KEY.fold("data"), torch.arange(count * 16)).reshape(count, 1, 4, 4)
    return Clean(latents=latents, prompts=prompts(count))


def prompts(count: int) -> FlowPrompts:
    conditions = Conditions(positive=torch.arange(count) % 3, negative=torch.full((count,), 3))
    return FlowPrompts(conditions=conditions, ids=torch.arange(count) + 10)


def judged(algorithm: Algorithm, state: af.TrainState) -> JudgedTrajectory:
    assert algorithm.sample is not None
    drawn = algorithm.sample(state, prompts(3))
    return JudgedTrajectory(rollout=drawn, rewards=drawn.final.mean((1, 2, 3)))
