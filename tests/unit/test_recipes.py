"""Algorithms that sample: what reaches the loss when the options of a specification change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipe_toys import POLICY, begun, judged

from areno_fn import tree
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.batch import JudgedRollout
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GRPO, GSPO, Sampled, Sampling
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.recipes import REFERENCE
from areno_fn.steps.token.experience import completion_kl, over_completions
from areno_fn.steps.token.score import reference_logp

SAMPLING = Sampling(max_tokens=5, temperature=0.9)
COMMON: dict[str, Any] = {"samples": 4, "sampling": SAMPLING}


def seen_by_the_loss(spec: Sampled) -> tuple[dict[str, torch.Tensor | None], JudgedRollout, TrainState]:
    """What all decisions of the first mini-batch carry, sorted by their recorded log-probabilities."""
    seen: list[Actions] = []

    def noting(actions: Actions) -> Sums:
        seen.append(actions)
        return clipped()(actions)

    algorithm, state = begun(spec, noting, micro_tokens=40)
    batch = judged(algorithm, state)
    algorithm.step(state, batch)
    names = ("old", "advantage", "reference", "rollout")
    fields = {
        name: None if getattr(seen[0], name) is None else torch.cat([getattr(a, name) for a in seen]) for name in names
    }
    recorded = fields["old"] if fields["rollout"] is None else fields["rollout"]
    assert recorded is not None
    return {n: None if value is None else ordered(recorded, value) for n, value in fields.items()}, batch, state


def ordered(recorded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values by what was recorded of their decisions; those of equal records by size."""
    values, place = values.sort()
    return values[recorded[place].argsort(stable=True)]


def by_recorded(batch: JudgedRollout, matrix: torch.Tensor) -> torch.Tensor:
    """Numbers [B] or [B, T] of a rollout, per drawn token in the order of `seen_by_the_loss`."""
    rollout = batch.rollout
    drawn = torch.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    spread = matrix if matrix.ndim == 2 else matrix[:, None].expand(rollout.tokens.shape)
    return ordered(rollout.logp[drawn], spread[drawn])


def logp_of(params: Any, batch: JudgedRollout) -> torch.Tensor:
    refer = reference_logp(POLICY, SAMPLING)
    return over_completions(lambda packed: refer(params, packed), batch.rollout, 1000)


@pytest.mark.parametrize("coefficient", [0.05, 0.5])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_in_the_reward_is_taken_with_its_coefficient(coefficient: float, estimator: Any) -> None:
    spec = GRPO(kl_coef=coefficient, kl_in="reward", kl_estimator=estimator, scale="none", **COMMON)
    seen, batch, state = seen_by_the_loss(spec)
    reference = logp_of(state.snapshots[REFERENCE], batch)
    lowered = batch.rewards - coefficient * completion_kl(batch.rollout, reference, estimator)
    expected = group_advantages(lowered, batch.rollout.groups, scale="none")
    assert (expected - group_advantages(batch.rewards, batch.rollout.groups, scale="none")).abs().max() > 0.01
    torch.testing.assert_close(seen["advantage"], by_recorded(batch, expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["reference"], by_recorded(batch, reference), rtol=1e-4, atol=1e-5)


def test_a_kl_is_either_in_the_loss_or_in_the_reward() -> None:
    reported = {}
    for place, coefficient in (("loss", 0.5), ("reward", 0.5), ("loss", 0.0)):
        algorithm, state = begun(GRPO(kl_coef=coefficient, kl_in=place, **COMMON))
        _, reported[place, coefficient] = algorithm.step(state, judged(algorithm, state))
    in_loss, in_reward, nowhere = reported.values()
    assert in_loss["train/loss"] == pytest.approx(in_loss["train/policy_loss"] + 0.5 * in_loss["train/kl"], rel=1e-5)
    assert in_reward["train/loss"] == in_reward["train/policy_loss"] and in_reward["train/kl"] > 0
    assert "train/kl" not in nowhere and in_loss["train/policy_loss"] == pytest.approx(nowhere["train/loss"], abs=1e-6)


@pytest.mark.parametrize(("baseline", "scale"), [("leave_one_out", "none"), ("batch", "batch"), ("group", "group")])
def test_the_baseline_is_read(baseline: Any, scale: Any) -> None:
    seen, batch, _ = seen_by_the_loss(GSPO(baseline=baseline, scale=scale, **COMMON))
    expected = group_advantages(batch.rewards, batch.rollout.groups, baseline=baseline, scale=scale)
    torch.testing.assert_close(seen["advantage"], by_recorded(batch, expected))


@pytest.mark.parametrize("spec", [GSPO(**COMMON), GSPO(kl_coef=0.1, mask_truncated=True, minibatches=3, **COMMON)])
def test_gspo_moves_the_actor_and_leaves_the_reference(spec: GSPO) -> None:
    algorithm, state = begun(spec)
    start = tree.map(torch.clone, state.snapshots)
    moved, metrics = algorithm.step(state, judged(algorithm, state))
    assert not tree.equal(moved.params, state.params) and tree.equal(moved.snapshots, start)
    clocks = moved.counters
    assert (clocks.optimizer_step, clocks.rollout_iteration) == (spec.minibatches, 1)
    if spec.minibatches == 1:  # nothing has moved since the rollout
        assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_dual_clip_and_its_absence_are_what_the_specification_says() -> None:
    """Log-probabilities that were recorded far too low make ratios that only a dual clip bounds."""
    found = []
    for dual in (0.0, 3.0):
        algorithm, state = begun(GRPO(dual_clip=dual, **COMMON))
        batch = judged(algorithm, state)
        low = replace(batch.rollout, logp=batch.rollout.logp - 3.0)
        _, metrics = algorithm.step(state, replace(batch, rollout=low))
        found.append(metrics["train/loss"])
    assert found[0] > 2 * found[1] > 0


@pytest.mark.parametrize("spec", [GRPO(**COMMON, kl_coef=0.1, importance_cap=2.0), GSPO(**COMMON, kl_coef=0.1)])
def test_what_has_been_recalled_is_not_computed_again(spec: Sampled) -> None:
    algorithm, state = begun(spec)
    batch = judged(algorithm, state)
    assert algorithm.recall is not None
    recalled = algorithm.recall(state, batch)
    assert recalled.reference is not None and (recalled.old is not None) == (spec.importance_cap > 0)
    assert tree.equal(algorithm.recall(state, recalled), recalled)
    whole, stepwise = algorithm.step(state, batch), algorithm.step(state, recalled)
    assert tree.equal(whole[0], stepwise[0]) and whole[1] == stepwise[1]
    other = replace(recalled, reference=recalled.reference * 2)
    assert algorithm.step(state, other)[1]["train/kl"] != stepwise[1]["train/kl"], "what is given is used"
