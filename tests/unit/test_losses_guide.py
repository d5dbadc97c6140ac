"""The guide to losses names everything that a specification can ask for."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from areno_fn.contracts.metrics import METRICS
from areno_fn.contracts.spec import DPO, GRPO, GSPO, PPO, SFT, Aggregation, AlgorithmSpec, PreferenceLoss
from areno_fn.steps.objectives.kl import ESTIMATORS

GUIDE = (Path(__file__).parents[2] / "docs/losses.md").read_text(encoding="utf-8")


def test_every_algorithm_loss_aggregation_and_estimator_is_named() -> None:
    every = {str(algorithm.__struct_config__.tag) for algorithm in get_args(AlgorithmSpec)}
    kinds = {"sft", "dpo", "grpo", "gspo", "ppo"}
    flow = (Path(__file__).parents[2] / "docs/flow.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in flow for name in every - kinds), "those of flow models have a guide of their own"
    for name in (*kinds, *get_args(Aggregation), *(set(ESTIMATORS) - {"abs"})):
        assert f"`{name}`" in GUIDE, name
    for name in get_args(PreferenceLoss):
        assert f'"{name}"' in GUIDE, name


def test_the_defaults_are_those_of_the_specification() -> None:
    assert (SFT().aggregation, DPO().beta, DPO().label_smoothing) == ("token_mean", 0.1, 0.0)
    assert (GRPO().clip_low, GRPO().clip_high, GRPO().kl_coef, GRPO().dual_clip) == (0.2, 0.2, 0.0, 0.0)
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    assert (PPO().clip_low, PPO().dual_clip, PPO().critic.clip, PPO().critic.coef) == (0.2, 3.0, 0.5, 0.5)
    assert {"train/importance_mean", "train/importance_max", "train/logp_diff_mean"} <= set(METRICS)


def test_what_has_other_names_is_what_the_guide_says() -> None:
    assert (GRPO().kl_estimator, GSPO().kl_estimator, PPO().kl_estimator) == ("k3", "k3", "k1")
    assert (GRPO().kl_in, GSPO().kl_in, PPO().kl_in) == ("loss", "loss", "reward")
    assert not hasattr(GSPO(), "aggregation")
    assert GRPO().aggregation == "token_mean"
    for name in ("RLOO", "REINFORCE++", "Dr. GRPO", "DAPO"):
        assert f"| {name} " in GUIDE, name
    assert "rollout/zero_std_groups" in METRICS
