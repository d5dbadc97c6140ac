"""Algorithms of several roles on a GPU: an iteration is that of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flow_recipe_toys import KEY, POLICY, prompts, start

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.spec import AdamWSpec, FlowDistill, FlowDMD2, FlowTaught, FlowTDM, FlowTDMR1, StudentDenoising
from areno_fn.steps.recipes import Materials, build

pytestmark = pytest.mark.gpu

ALGORITHMS: dict[str, FlowTaught] = {
    "dmd2": FlowDMD2(samples=2, fake_updates=2),
    "tdm": FlowTDM(samples=2, fake_updates=2, teacher_guidance=2.0),
    "tdm_r1": FlowTDMR1(samples=2, fake_updates=2, teacher_guidance=2.0),
    "distill": FlowDistill(teacher_guidance=2.0),
    "distill, noisy": FlowDistill(
        teacher_guidance=2.0, denoising=StudentDenoising(steps=4, dynamics="flow_sde", level=0.5), space="gaussian"
    ),
}


def iteration(spec: FlowTaught, device: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The parameters of all roles after one, and what it reported."""
    movers = {role: af.adamw(AdamWSpec(role=role, lr=1e-3), 10) for role in spec.roles}
    algorithm = build(spec, Materials(policy=POLICY, optimizers=movers), None)
    params = {"actor": tree.map(lambda x: x.to(device), start())}
    state = algorithm.begin(
        af.TrainState(params=params, optim={}, snapshots={}, counters=af.Counters(), key=KEY, cursor=af.Cursor())
    )
    assert algorithm.sample is not None
    batch: Any = algorithm.sample(state, tree.map(lambda x: x.to(device), prompts(3)))
    if isinstance(spec, FlowTDMR1):
        batch = JudgedTrajectory(rollout=batch, rewards=batch.final.mean((1, 2, 3)))
    state, metrics = algorithm.step(state, batch)
    return state.params, dict(metrics)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_iteration_is_that_of_the_cpu(name: str) -> None:
    (ours, told), (theirs, expected) = (iteration(ALGORITHMS[name], device) for device in ("cuda", "cpu"))
    for role, own in ours.items():
        for (path, received), other in zip(tree.leaves_with_path(own), tree.leaves(theirs[role]), strict=True):
            torch.testing.assert_close(received.cpu(), other, atol=5e-3, rtol=1e-3, msg=f"{role}.{path}")
    assert told.keys() == expected.keys()
    for key, value in told.items():
        assert value == pytest.approx(expected[key], rel=2e-2, abs=1e-4), key
