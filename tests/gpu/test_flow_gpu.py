"""Flow matching on a GPU: what was sampled is scored again, and an update is that of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flow_models import numbers

from areno_fn import tree
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.flow_match import Judges
from areno_fn.contracts.key import Key
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.model import DiT, DiTPolicy, init
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.flow.match import match
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.distribution import dmd2
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import noised, predict
from areno_fn.steps.flow.replay import replays
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import act_flow, denoising
from areno_fn.steps.flow.times import Times
from areno_fn.steps.flow.unipc import unipc_schedule
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.testing import laws

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIG = DiTConfig(num_layers=2, num_heads=2, head_dim=12)
POLICY = DiTPolicy(CONFIG)


def parameters(device: str, name: str = "") -> DiT:
    params = init(CONFIG, Key.of(0))
    return tree.map_with_path(lambda path, x: (x + numbers(name + path, *x.shape, scale=0.05)).to(device), params)


def prompts(device: str, count: int = 4) -> FlowPrompts:
    labels = torch.arange(count, device=device)
    conditions = Conditions(positive=labels, negative=torch.full_like(labels, CONFIG.num_classes))
    return FlowPrompts(conditions=conditions, ids=torch.arange(count, device=device))


def test_training_recomputes_what_the_rollout_recorded() -> None:
    for dynamics in ("flow_sde", "dance_sde", "cps"):
        process = Process(dynamics=dynamics, guidance=2.0)  # type: ignore[arg-type]
        laws.trajectory_matches_training(
            POLICY, parameters(DEVICE), prompts(DEVICE), Key.of(3), process, flow_match(4), noise_levels(4, None),
            same=1e-5, tolerance=1e-4,
        )  # fmt: skip


def updates(device: str) -> list[Any]:
    params, given, key = parameters(device), prompts(device), Key.of(1)
    clean = numbers("clean", 4, *POLICY.latent_shape).to(device)
    batches = noised(clean, given.conditions, given.ids, key, Times(kind="logit_normal"))
    found = [accumulate(pipeline(predict(POLICY), velocity_matching()))(params, batches)[0]]
    drawn = flow_sampler(POLICY, Process())(params, given, key, flow_match(4), noise_levels(4, [1]))
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], device=device)
    found.append(accumulate(pipeline(act_flow(POLICY), clipped()))(params, denoising(drawn, advantages))[0])
    ode = flow_sampler(POLICY, Process(dynamics="ode"))(
        params, given, key, flow_match(2), noise_levels(2, ()), keep=[0, 1]
    )
    judges = Judges(generator=params, real=parameters(device, "real"), fake=parameters(device, "fake"))
    replay = replays(ode, key, Times(low=0.1, high=0.9))
    found.append(accumulate(pipeline(match(POLICY), dmd2()))(judges, replay)[0].generator)
    unipc = flow_sampler(POLICY, Process(dynamics="ode", solver="unipc"))
    found.append(unipc(params, given, key, unipc_schedule(4), noise_levels(4, ())).final)
    return found


def test_updates_and_samples_are_those_of_the_cpu() -> None:
    for ours, theirs in zip(updates(DEVICE), updates("cpu"), strict=True):
        for received, expected in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
            scale = float(expected.abs().max()) + 1e-6
            assert received.device.type == DEVICE and float((received.cpu() - expected).abs().max()) <= 2e-3 * scale
