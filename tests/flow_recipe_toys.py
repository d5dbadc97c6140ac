"""Named algorithms of flow models on a tiny DiT of three classes, whose label 3 is no class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow import Conditions, FlowPrompts, Trajectory
from areno_fn.contracts.flow_batch import Clean, JudgedTrajectory
from areno_fn.contracts.spec import FlowTaught, SGDSpec
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.model import DiTPolicy, init
from areno_fn.steps.optimizers import optimizer_from
from areno_fn.steps.recipes import Algorithm, Materials, Teaching, build

POLICY = DiTPolicy(DiTConfig(num_classes=3, sample_size=4, num_layers=1, num_heads=2, head_dim=8))
KEY = af.Key.of(5)
MOVED = SGDSpec(lr=0.1, max_grad_norm=0.0, weight_decay=0.0)
STILL = optimizer_from(
    (lambda params: (), lambda gradients, state, params: (tree.map(torch.zeros_like, gradients), state))
)
"""An optimizer that moves nothing."""


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


def taught(
    spec: FlowTaught,
    movers: Mapping[str, Any] | None = None,
    teacher: Any = None,
    losses: Any = None,
    *,
    key: af.Key = KEY,
    **materials: Any,
) -> tuple[Algorithm, af.TrainState]:
    """An algorithm with a teacher, and the state that a phase of it begins with.

    Args:
        movers: optimizers by role; plain steps where there are none.
        teacher: policy and parameters of the folder called "folder".
        losses: of one's own.
        key: of the run.
        materials: what else there is.
    """
    moved = {role: (movers or {}).get(role) or af.sgd(MOVED, 10) for role in spec.roles}
    if teacher is not None:
        materials["teachers"] = {"folder": Teaching(role="teacher", policy=teacher[0])}
    algorithm = build(spec, Materials(policy=POLICY, optimizers=moved, **materials), losses)
    params = {"actor": start()} | ({} if teacher is None else {"teacher": teacher[1]})
    state = af.TrainState(params=params, optim={}, snapshots={}, counters=af.Counters(), key=key, cursor=af.Cursor())
    return algorithm, algorithm.begin(state)


def drawn(algorithm: Algorithm, state: af.TrainState) -> Trajectory:
    assert algorithm.sample is not None
    found = algorithm.sample(state, prompts(3))
    assert isinstance(found, Trajectory)
    return found


def worth(batch: Trajectory, rewards: torch.Tensor | None = None) -> JudgedTrajectory:
    """A rollout whose rewards are how bright it is, or those that are given."""
    return JudgedTrajectory(rollout=batch, rewards=batch.final.mean((1, 2, 3)) if rewards is None else rewards)


def judged(algorithm: Algorithm, state: af.TrainState) -> JudgedTrajectory:
    return worth(drawn(algorithm, state))
