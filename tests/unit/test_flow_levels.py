"""The noise levels and steps that are trained at, where a part of the model stays frozen or a schedule begins late."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from flow_recipe_toys import MOVED, POLICY, clean, prompts, state_of, worth

import areno_fn as af
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow_adapter import NoiseLevels
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Denoising, FlowDPO, FlowGRPO, FlowNFT, FlowSFT, NoisyDenoising
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.recipes import Algorithm, Materials, build
from areno_fn.steps.recipes.algorithm import rollout_key

HIGH, LOW = NoiseLevels(low=0.6), NoiseLevels(high=0.6)


@attrs.frozen(eq=False)
class Listening:
    """The tiny policy, which notes the times that it is asked at where a gradient is taken."""

    asked: list[float]
    latent_shape = POLICY.latent_shape
    guide = staticmethod(straight)

    def velocity(self, params: Any, state: torch.Tensor, timestep: torch.Tensor, condition: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.asked.extend((timestep / 1000).tolist())
        return POLICY.velocity(params, state, timestep, condition)


def made(spec: Any, levels: NoiseLevels, asked: list[float] | None = None) -> Algorithm:
    policy = Listening([] if asked is None else asked)
    return build(spec, Materials(policy=policy, optimizers={"actor": af.sgd(MOVED, 10)}, levels=levels))


@pytest.mark.parametrize("levels", [HIGH, LOW], ids=["high", "low"])
@pytest.mark.parametrize(
    "spec",
    [
        FlowSFT(),
        FlowDPO(terms=3),
        FlowNFT(samples=2, denoising=Denoising(steps=6), terms=3),
        FlowNFT(samples=2, denoising=Denoising(steps=6), times="grid", terms=3),
        FlowGRPO(samples=2, denoising=NoisyDenoising(steps=6)),
    ],
    ids=["flow_sft", "flow_dpo", "flow_nft", "flow_nft on a grid", "flow_grpo"],
)
def test_nothing_is_trained_at_levels_of_what_stays_frozen(spec: Any, levels: NoiseLevels) -> None:
    asked: list[float] = []
    algorithm = made(spec, levels, asked)
    state, batch = state_of(algorithm), clean()
    for _ in range(3):
        given = batch if algorithm.sample is None else worth(algorithm.sample(state, prompts(3)))
        state, _ = algorithm.step(state, given)
    assert len(asked) >= 18 and len(set(asked)) >= 2
    assert all(levels.low <= level <= levels.high for level in asked)


def test_at_the_boundary_the_noisier_part_is_asked() -> None:
    times = torch.tensor([1000.0, 600.0, 599.99, 1.0])
    assert HIGH.trains_at(times).tolist() == [True, True, False, False]
    assert LOW.trains_at(times).tolist() == [False, False, True, True]
    assert NoiseLevels().trains_at(times).all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (FlowDPO(until=0.3), "algorithm.until: 0.3 of the way from noise to data ends at the level 0.7, above all levels"),
        (
            FlowGRPO(denoising=NoisyDenoising(steps=4, noisy=[0, 2])),
            "algorithm.denoising.noisy: step 0 is at the level 1, but what is trained is asked at levels from 0 to 0.6; leave",
        ),
        (FlowGRPO(denoising=NoisyDenoising(steps=2)), "at none of the steps that would be trained on of the levels 1, 0.5"),
        (FlowGRPO(denoising=NoisyDenoising(steps=4, count=2)), "count: 2 noisy steps cannot be chosen among 1; lower it"),
        (FlowNFT(denoising=Denoising(steps=4), times="grid", until=0.5), "of the levels 1, 0.75, 0.5, 0.25; take more"),
    ],
)  # fmt: skip
def test_phases_that_could_learn_nothing_are_refused(spec: Any, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        made(spec, LOW)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_what_begins_with_latents_makes_the_last_steps_from_them() -> None:
    """Of 5 even steps a strength of .8 makes 4, from the level .8."""
    usual, said = NoiseLevels(strength=0.8), NoisyDenoising(steps=5, strength=0.4)
    algorithm = made(FlowGRPO(samples=2, denoising=NoisyDenoising(steps=5)), usual)
    state, begin = state_of(algorithm), clean(3).latents
    assert algorithm.sample is not None
    drawn = algorithm.sample(state, replace(prompts(3), begin=begin))
    assert drawn.schedule.sigmas.tolist() == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    noise = latent_noise(rollout_key(state).fold("start"), drawn.ids, (1, 4, 4))
    near = begin.repeat_interleave(2, 0)
    assert torch.allclose(drawn.state(0), 0.2 * near + 0.8 * noise, atol=1e-6)
    assert drawn.transition_map == (0, 1, 2, -1)
    _, metrics = algorithm.step(state, worth(drawn))
    assert metrics["train/ratio_max"] == 1.0
    shorter = made(FlowGRPO(samples=2, denoising=said), usual)
    assert shorter.sample is not None
    assert shorter.sample(state_of(shorter), replace(prompts(3), begin=begin)).schedule.steps == 2
