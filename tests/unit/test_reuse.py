"""Rollouts that several updates are made of: what was recorded stays, and what moves away from it is clipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from recipe_toys import POLICY, begun, judged, updates

from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GRPO, GSPO, PPO, Sampling
from areno_fn.steps.recipes import ACTOR
from areno_fn.steps.recipes.sampled import updates_of
from areno_fn.steps.token.experience import drawn_places, over_completions
from areno_fn.steps.token.score import reference_logp

SAMPLING = Sampling(max_tokens=5, temperature=0.9)
COMMON: dict[str, Any] = {"samples": 4, "sampling": SAMPLING, "epochs": 2, "minibatches": 3}
SPECS = {
    "grpo": GRPO(**COMMON),
    "gspo": GSPO(**COMMON),
    "ppo": PPO(**COMMON),
    "rloo": GRPO(baseline="leave_one_out", scale="none", **COMMON),
}
every_spec = pytest.mark.parametrize("name", SPECS)


@every_spec
def test_L17_the_ratio_is_one_before_the_first_update_and_the_clip_binds_later(name: str) -> None:
    seen, _, _ = updates(SPECS[name], rate=0.03)
    assert len(seen) == 6, "two epochs of three mini-batches"
    ratios = [update.measured["ratio_std"] for update in seen]
    assert seen[0].measured["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and ratios[0] < 1e-5
    assert all(spread > 1e-3 for spread in ratios[1:])
    bound = [update.measured["clip_fraction"] for update in seen]
    assert bound[0] == 0.0 and max(bound[1:]) > 0.0
    assert seen[0].measured["logp_diff_max"] < 1e-5 < 1e-2 < seen[-1].measured["logp_diff_max"]


@every_spec
def test_S2_what_was_recorded_stays_through_all_epochs(name: str) -> None:
    seen, batch, state = updates(SPECS[name], rate=0.03)
    rollout, places = batch.rollout, drawn_places(batch.rollout)
    chosen = updates_of(SPECS[name], state, rollout.lengths.shape[0])
    for update, rows in zip(seen, chosen, strict=True):
        recorded = rollout.logp[rows][places[rows]]
        assert update.old.sort().values.tolist() == recorded.sort().values.tolist()
        assert update.rollout is None
    for epoch in (chosen[:3], chosen[3:]):
        assert sorted(torch.cat(list(epoch)).tolist()) == list(range(rollout.lengths.shape[0]))
    for first, second in (seen[:3], seen[3:]), (seen[3:], seen[:3]):
        both = [sorted(torch.cat([u.advantage for u in part]).tolist()) for part in (first, second)]
        assert both[0] == both[1], "one epoch has the advantages of the other"


@pytest.mark.parametrize("algorithm", [GRPO, GSPO, PPO])
def test_old_is_computed_again_once_to_correct_for_the_rollout(algorithm: Any) -> None:
    """By the parameters that drew, before the first update; what the rollout recorded is kept beside it."""
    spec = algorithm(importance_cap=2.0, **COMMON)
    seen, batch, state = updates(spec, rate=0.03)
    rollout, places = batch.rollout, drawn_places(batch.rollout)
    refer = reference_logp(POLICY, SAMPLING)
    again = over_completions(lambda packed: refer(state.params[ACTOR], packed), rollout, 1000)
    for update, rows in zip(seen, updates_of(spec, state, rollout.lengths.shape[0]), strict=True):
        inside = places[rows]
        assert update.rollout is not None
        assert update.rollout.sort().values.tolist() == rollout.logp[rows][inside].sort().values.tolist()
        torch.testing.assert_close(update.old.sort().values, again[rows][inside].sort().values, rtol=0, atol=1e-5)
        for name in ("importance_mean", "importance_max"):
            assert update.measured[name] == pytest.approx(1.0, abs=1e-4), "rollout and training are one arithmetic here"
    assert seen[-1].measured["ratio_std"] > 1e-3


@pytest.mark.parametrize("algorithm", [GRPO, GSPO, PPO])
def test_the_cap_of_a_specification_reaches_the_loss(algorithm: Any) -> None:
    """Recorded log-probabilities that are .5 too low weigh every term by e^.5, or by the cap, and so its gradient."""
    norms = {}
    for cap in (1.2, 100.0):
        spec = algorithm(importance_cap=cap, samples=4, sampling=SAMPLING)
        built, state = begun(spec)
        batch = judged(built, state)
        low = replace(batch, rollout=replace(batch.rollout, logp=batch.rollout.logp - 0.5))
        _, metrics = built.step(state, low)
        norms[cap] = metrics["train/grad_norm"]
        for name in ("train/importance_mean", "train/importance_max"):
            assert metrics[name] == pytest.approx(math.exp(0.5), rel=1e-3), "whatever the cap"
        assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert norms[1.2] / norms[100.0] == pytest.approx(1.2 / math.exp(0.5), rel=1e-3)
