"""Every objective of latents on a model: rows of weight 0 are never read, and neither order nor cuts change a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_models import SHAPE, Field, numbers, parameters, prompts

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow import Dynamics, Process
from areno_fn.contracts.flow_batch import Denoising, Noised
from areno_fn.contracts.flow_match import Judges, Replay
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.match import followed, match
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.coupled import distilled, dppo, flow_grpo, grpo_guard
from areno_fn.steps.flow.objectives.decoupled import AWM_WEIGHTINGS, advantage_weighted, centred_reward, diffusion_nft
from areno_fn.steps.flow.objectives.distribution import dmd2, rewarded_matching, trajectory_matching
from areno_fn.steps.flow.objectives.matching import WEIGHTINGS, velocity_matching
from areno_fn.steps.flow.objectives.preference import diffusion_dpo, group_preference
from areno_fn.steps.flow.path import noised, predict, remember
from areno_fn.steps.flow.replay import carried, replays
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import act_flow, denoising, move, recall
from areno_fn.steps.flow.times import Times
from areno_fn.testing import laws

POLICY, PARAMS = Field(), parameters()
ROWS = 16
MADE = ("old", "reference", "average")
Problem = tuple[Callable[[Any, Any], af.Sums], Any, Any]
"""An objective, its parameters and its batch."""


def mask_of(rows: int) -> torch.Tensor:
    return torch.arange(rows * 6).reshape(rows, *SHAPE) % 5 != 1


def samples(size: int, guidance: float = 1.0, masked: bool = False) -> Noised:
    """Noised samples in groups, with advantages of both signs in turn and every velocity."""
    given, groups = prompts(ROWS, negative=True), torch.arange(ROWS) // size
    advantage = numbers("advantage", ROWS).abs() * torch.tensor([1.0, -1.0] * (ROWS // 2))
    (made,) = noised(
        numbers("clean", ROWS, *SHAPE), given.conditions, given.ids, Key.of(1), Times(low=0.05, high=0.95), shared=groups,
        advantage=advantage, groups=groups, guidance=guidance, mask=mask_of(ROWS) if masked else None,
    )  # fmt: skip
    made = replace(made, factor=numbers("factor", ROWS).abs() + 0.5)
    return remember(POLICY, made, **{name: parameters(name) for name in MADE})


def of_samples(loss: Any, size: int = 4, **more: Any) -> Problem:
    return af.pipeline(predict(POLICY), loss), PARAMS, samples(size, **more)


def steps(dynamics: Dynamics, guidance: float = 1.0, masked: bool = False) -> Denoising:
    """Recorded steps, with the transitions of two other models."""
    level = 0.0 if dynamics == "ode" else 0.6
    given = prompts(8, negative=True)
    given = replace(given, mask=mask_of(8) if masked else None)
    draw = flow_sampler(POLICY, Process(dynamics=dynamics, guidance=guidance))
    schedule, levels = flow_match(4), torch.tensor([level, level, level, 0.0])
    drawn = draw(parameters("old"), given, Key.of(2), schedule, levels, samples=2, keep=[1])
    (made,) = denoising(drawn, numbers("advantage", ROWS), steps=[1])
    return recall(POLICY, made, before=parameters("old"), reference=parameters("reference"))


def of_steps(loss: Any, dynamics: Dynamics = "flow_sde", **more: Any) -> Problem:
    return af.pipeline(move(POLICY), loss), PARAMS, steps(dynamics, **more)


def of_actions(dynamics: Dynamics) -> Problem:
    return af.pipeline(act_flow(POLICY), af.clipped(0.2, 0.2)), PARAMS, steps(dynamics)


def rollout() -> Any:
    draw = flow_sampler(POLICY, Process(dynamics="ode"))
    return draw(
        PARAMS, prompts(8, negative=True), Key.of(3), flow_match(4), noise_levels(4, ()), samples=2, keep=range(4)
    )


def judges() -> Judges:
    return Judges(generator=PARAMS, **{name: parameters(name) for name in ("real", "fake", "surrogate")})


def replay(query: str = "interval") -> Replay:
    return replays(rollout(), Key.of(4), Times(low=0.05, high=0.9), query=query, steps=[1], real_guidance=3.0)[0]


def of_replay(loss: Any, query: str = "interval", rewards: bool = False) -> Problem:
    return af.pipeline(match(POLICY, rewards=rewards), loss), judges(), replay(query)


def follower() -> Problem:
    batch = followed(POLICY, PARAMS, replay())
    return af.pipeline(predict(POLICY), velocity_matching("data", snr_cap=5.0)), parameters("fake"), batch


def surrogate() -> Problem:
    drawn = rollout()
    made = carried(
        drawn, Key.of(5), Times(low=0.1, high=0.9), shared=drawn.groups, advantage=numbers("advantage", ROWS)
    )
    return (
        af.pipeline(predict(POLICY), group_preference(1.0)), PARAMS, remember(POLICY, made[1], reference=parameters("slow"))
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[], Problem]] = {
    **{f"matching {how}": lambda how=how: of_samples(velocity_matching(how, snr_cap=5.0)) for how in WEIGHTINGS},
    "matching, padded": lambda: of_samples(velocity_matching(), masked=True),
    "nft": lambda: of_samples(diffusion_nft(0.5, kl_coef=0.1)),
    "nft, guided": lambda: of_samples(diffusion_nft(0.5, adaptive=False), guidance=2.0),
    **{
        f"awm {how}": lambda how=how: of_samples(advantage_weighted(how, 0.9, 0.9, kl_coef=0.1, average_kl_coef=0.1))
        for how in AWM_WEIGHTINGS
    },
    "crd": lambda: of_samples(centred_reward(temperature=0.3, kl_coef=0.1, kl_floor=0.01)),
    "crd of signs": lambda: of_samples(centred_reward(loss="bce", temperature=0.0)),
    "dpo": lambda: of_samples(diffusion_dpo(10.0), size=2),
    "dgpo": lambda: of_samples(group_preference(10.0, trust=0.01, runaway=0.05, anchor=0.1, kl_coef=0.1)),
    "dgpo, strict": lambda: of_samples(group_preference(1.0, strict=True), size=8),
    **{f"clipped {how}": lambda how=how: of_actions(how) for how in ("flow_sde", "dance_sde", "cps")},
    **{f"grpo {how}": lambda how=how: of_steps(flow_grpo(0.2, 0.2, kl_coef=0.1), how) for how in ("flow_sde", "cps")},
    "grpo, guided": lambda: of_steps(flow_grpo(0.2, 0.2, kl_coef=0.1, kl_space="gaussian"), guidance=2.0),
    "grpo, padded": lambda: of_steps(flow_grpo(0.2, 0.2, kl_coef=0.1, kl_space="mean"), masked=True),
    "guard": lambda: of_steps(grpo_guard(0.2, 0.2, step_reweight=True, kl_coef=0.1)),
    "dppo": lambda: of_steps(dppo(1e-4, kl_coef=0.1)),
    "distilled, noisy": lambda: of_steps(distilled("gaussian")),
    **{f"distilled {how}": lambda how=how: of_steps(distilled(how, normalised=True), "ode") for how in ("mean", "data")},
    "dmd2": lambda: of_replay(dmd2(), "anywhere"),
    "tdm": lambda: of_replay(trajectory_matching()),
    "tdm-r1": lambda: of_replay(rewarded_matching(), rewards=True),
    "follower": follower,
    "surrogate": surrogate,
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_of_weight_0_do_not_exist(name: str) -> None:
    laws.mask_blind(*PROBLEMS[name]())


@pytest.mark.parametrize("name", PROBLEMS)
def test_neither_order_nor_micro_batches_change_the_gradient(name: str) -> None:
    objective, params, batch = PROBLEMS[name]()
    laws.permutation_invariant(objective, params, batch, orders=2, tolerance=2e-6)
    laws.accumulation_invariant(objective, params, batch, (1, 2), tolerance=2e-6)


@pytest.mark.parametrize("name", ["nft", "dgpo, strict", "guard", "tdm"])
def test_rows_that_count_are_what_they_are_without_the_others(name: str) -> None:
    """The last group, or the last rows, with NaN in all of theirs: the sums are those of the others alone."""
    objective, params, batch = PROBLEMS[name]()
    dead = torch.arange(ROWS) >= ROWS // 2

    def hidden(path: str, leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return leaf
        return leaf.masked_fill(dead.reshape(-1, *[1] * (leaf.ndim - 1)), 0.0 if path == "weight" else torch.nan)

    fewer = tree.map(lambda x: x[: ROWS // 2], batch)
    if isinstance(batch, Denoising):
        fewer = replace(fewer, documents=ROWS // 2)
    laws.exact_under_split(objective, params, tree.map_with_path(hidden, batch), [fewer], tolerance=2e-6)
