"""Updates of flow matching are one graph for torch.compile, with the numbers of the update that is not traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_models import SHAPE, Field, numbers, parameters, prompts

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.flow import Process
from areno_fn.contracts.flow_batch import Denoising, Noised
from areno_fn.contracts.key import Key
from areno_fn.steps.compose import Objective, pipeline
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.coupled import grpo_guard
from areno_fn.steps.flow.objectives.decoupled import advantage_weighted, centred_reward, diffusion_nft
from areno_fn.steps.flow.objectives.preference import diffusion_dpo, group_preference
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import denoising, move, recall
from areno_fn.steps.flow.times import Times

POLICY, PARAMS = Field(), parameters()
ROWS = 4


def steps() -> Denoising:
    rollout = flow_sampler(POLICY, Process(guidance=2.0))
    drawn = rollout(PARAMS, prompts(ROWS, negative=True), Key.of(0), flow_match(4), noise_levels(4, None))
    (batch,) = denoising(drawn, numbers("advantage", ROWS), steps=[1])
    return recall(POLICY, batch, before=PARAMS, reference=parameters("reference"))


def samples() -> Noised:
    given, pairs = prompts(ROWS), torch.arange(ROWS) // 2
    advantage = torch.tensor([1.0, -1.0, 0.5, -2.0])
    (batch,) = noised(
        numbers("clean", ROWS, *SHAPE), given.conditions, given.ids, Key.of(0), Times(), shared=pairs,
        advantage=advantage, groups=pairs,
    )  # fmt: skip
    return remember(POLICY, batch, old=parameters("old"), reference=parameters("reference"))


CASES: dict[str, tuple[Objective, Callable[[], Any]]] = {
    "guard": (pipeline(move(POLICY), grpo_guard(0.2, 0.2, kl_coef=0.1)), steps),
    "dpo": (pipeline(predict(POLICY), diffusion_dpo(10.0)), samples),
    "strict": (pipeline(predict(POLICY), group_preference(1.0, strict=True)), samples),
    "nft": (pipeline(predict(POLICY), diffusion_nft()), samples),
    "awm": (pipeline(predict(POLICY), advantage_weighted()), samples),
    "crd": (pipeline(predict(POLICY), centred_reward()), samples),
}


@pytest.mark.traced
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_one_graph(name: str) -> None:
    objective, make = CASES[name]

    def update(params: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        return value_and_grad(lambda moved: objective(moved, batch).total)(params)

    torch._dynamo.reset()
    batch = make()
    loss, gradient = torch.compile(update, fullgraph=True, backend="aot_eager")(PARAMS, batch)
    expected, slope = update(PARAMS, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for received, right in zip(tree.leaves(gradient), tree.leaves(slope), strict=True):
        assert torch.allclose(received, right, atol=1e-6)
