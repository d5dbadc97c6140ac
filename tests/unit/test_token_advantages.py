"""What PPO and REINFORCE++ give their losses, against loops over single documents: values, KL, advantages, returns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from recipe_toys import POLICY, begun, judged, updates

from areno_fn.contracts.batch import JudgedRollout
from areno_fn.contracts.spec import GRPO, PPO, Critic, Sampling
from areno_fn.contracts.state import TrainState
from areno_fn.steps.recipes import CRITIC, REFERENCE

SAMPLING = Sampling(max_tokens=5, temperature=0.9)
COMMON: dict[str, Any] = {"samples": 2, "sampling": SAMPLING, "kl_coef": 0.3}


def hidden(params: Any, tokens: list[int]) -> torch.Tensor:
    places = torch.arange(len(tokens))
    return POLICY.hidden(params, torch.tensor(tokens), places, torch.zeros_like(places))


def expected(
    batch: JudgedRollout, state: TrainState, kl_coef: float, gamma: float = 1.0, lam: float = 1.0
) -> list[dict[str, list[float]]]:
    """Of every completion: the value before each token, its KL, its advantage before whitening and its return."""
    rollout, found = batch.rollout, []
    critic, start = state.params.get(CRITIC), state.snapshots[REFERENCE]
    for row, length in enumerate(rollout.lengths.tolist()):
        prompt = rollout.prompts.tokens[row, : rollout.prompts.lengths[row]].tolist()
        tokens = prompt + rollout.tokens[row, :length].tolist()
        first = len(prompt)
        v = [0.0] * length
        if critic is not None:
            v = [float(hidden(critic.trunk, tokens[: first + t])[-1] @ critic.head[0]) for t in range(length)]
        logp = (POLICY.logits(start, hidden(start, tokens)) / 0.9).log_softmax(-1)
        said = [float(logp[first + t - 1, tokens[first + t]]) for t in range(length)]
        divergence = [float(rollout.logp[row, t]) - said[t] for t in range(length)]
        rewards = [-kl_coef * d for d in divergence]
        rewards[-1] += float(batch.rewards[row])
        after, advantages = 0.0, [0.0] * length
        for t in reversed(range(length)):
            following = v[t + 1] if t + 1 < length else 0.0
            after = rewards[t] + gamma * following - v[t] + gamma * lam * after
            advantages[t] = after
        returns = [a + value for a, value in zip(advantages, v, strict=True)]
        found.append({"v": v, "kl": divergence, "advantage": advantages, "return": returns})
    return found


def whitened(values: list[float], over: list[float]) -> list[float]:
    """Standard scores by the mean and the deviation of `over`."""
    mean = math.fsum(over) / len(over)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in over) / len(over))
    return [(x - mean) / spread for x in values]


def flat(rows: list[dict[str, list[float]]], name: str) -> list[float]:
    return [x for row in rows for x in row[name]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7)])
@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_are_those_of_values_before_the_tokens(gamma: float, lam: float, whiten: bool) -> None:
    spec = PPO(gamma=gamma, lam=lam, whiten=whiten, **COMMON)
    (update,), batch, state = updates(spec)
    right = flat(expected(batch, state, 0.3, gamma, lam), "advantage")
    if whiten:
        right = whitened(right, right)
    assert sorted(update.advantage.tolist()) == pytest.approx(sorted(right), abs=5e-5)


def test_the_critic_is_asked_for_the_returns_and_explains_their_variance() -> None:
    spec = PPO(critic=Critic(clip=100.0, coef=0.8), **COMMON)
    algorithm, state = begun(spec)
    batch = judged(algorithm, state)
    rows = expected(batch, state, 0.3, lam=spec.lam)
    _, metrics = algorithm.step(state, batch)
    v, returns = flat(rows, "v"), flat(rows, "return")
    errors = [(a - b) ** 2 for a, b in zip(v, returns, strict=True)]
    assert metrics["critic/loss"] == pytest.approx(0.8 * 0.5 * math.fsum(errors) / len(errors), rel=1e-4)
    assert metrics["critic/clip_fraction"] == 0.0 and metrics["critic/tokens"] == len(v)

    def variance(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.fsum((x - mean) ** 2 for x in values) / len(values)

    explained = 1 - variance([a - b for a, b in zip(returns, v, strict=True)]) / variance(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)
    kl = [math.fsum(row["kl"]) for row in rows]
    assert metrics["rollout/kl"] == pytest.approx(math.fsum(kl) / len(kl), abs=1e-4)
    assert metrics["rollout/kl_coef"] == 0.3


def test_the_coefficient_that_the_rewards_are_lowered_by_is_the_one_that_adapts() -> None:
    """A target far below the measured KL raises it by 0.2 of the samples over the horizon, and the next step reads it."""
    spec = PPO(kl_target=1e-3, kl_horizon=30, **COMMON)
    algorithm, state = begun(spec)
    batch = judged(algorithm, state)
    moved, metrics = algorithm.step(state, batch)
    assert metrics["rollout/kl"] > 2e-3 and metrics["rollout/kl_coef"] == 0.3
    raised = 0.3 * (1 + 0.2 * 6 / 30)
    assert moved.controls["kl_scale"] == pytest.approx(raised / 0.3)
    _, again = algorithm.step(moved, batch)
    assert again["rollout/kl_coef"] == pytest.approx(raised)


@pytest.mark.parametrize("counts", [{"minibatches": 3}, {"minibatches": 2, "epochs": 2}])
def test_L3_whitening_is_one_map_for_all_mini_batches(counts: dict[str, int]) -> None:
    """Mini-batches are parts of the whitened rollout and are not whitened by themselves."""
    (whole,), _, _ = updates(PPO(**COMMON))
    parts, _, _ = updates(PPO(**counts, **COMMON))
    per_epoch = counts["minibatches"]
    for epoch in range(counts.get("epochs", 1)):
        found = torch.cat([part.advantage for part in parts[epoch * per_epoch : (epoch + 1) * per_epoch]])
        assert sorted(found.tolist()) == sorted(whole.advantage.tolist())
    assert abs(float(parts[0].advantage.mean())) > 0.01 and abs(float(whole.advantage.mean())) < 1e-6


@pytest.mark.parametrize("coefficient", [0.05, 0.5])
def test_reinforce_plus_plus_whitens_what_is_to_come_of_every_token(coefficient: float) -> None:
    """The reward less the KL from a token on, with the coefficient of the specification, over all tokens of the batch."""
    options: dict[str, Any] = {"baseline": "batch", "scale": "batch", "kl_in": "reward", "kl_estimator": "k1"}
    spec = GRPO(samples=2, sampling=SAMPLING, kl_coef=coefficient, **options)
    (update,), batch, state = updates(spec)
    right = flat(expected(batch, state, coefficient), "advantage")
    assert sorted(update.advantage.tolist()) == pytest.approx(sorted(whitened(right, right)), abs=5e-5)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_L5_what_is_cut_off_is_not_whitened_with(algorithm: str) -> None:
    """Mean and deviation are of the completions that ended; the others count for nothing in the loss."""
    common: dict[str, Any] = {**COMMON, "samples": 4, "kl_estimator": "k1", "mask_truncated": True}
    spec = PPO(**common) if algorithm == "ppo" else GRPO(baseline="batch", scale="batch", kl_in="reward", **common)
    (update,), batch, state = updates(spec)
    ended = batch.rollout.finished.tolist()
    assert 0 < sum(ended) < len(ended)
    rows = expected(batch, state, 0.3, lam=0.95 if algorithm == "ppo" else 1.0)
    counted = flat([row for row, whole in zip(rows, ended, strict=True) if whole], "advantage")
    found = sorted(update.advantage.tolist())
    zeros = [0.0] * (len(found) - len(counted))
    assert found == pytest.approx(sorted(whitened(counted, counted) + zeros), abs=5e-5)
    assert update.measured["tokens"] == len(counted)
