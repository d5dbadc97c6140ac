"""Guard, DPPO, DGPO, CRD and preferences as named algorithms: their zero states, gradients and copies."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flow_recipe_toys import KEY, MOVED, POLICY, clean, judged, made, prompts, state_of

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow import Conditions, FlowPrompts
from areno_fn.contracts.flow_adapter import EVEN
from areno_fn.contracts.flow_batch import Clean, EachReward, JudgedTrajectory, Moves, Velocities
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import (
    EMA,
    AdamWSpec,
    Denoising,
    FlowAWM,
    FlowCRD,
    FlowDGPO,
    FlowDPO,
    FlowDPPO,
    FlowGRPO,
    FlowGRPOGuard,
    FlowNFT,
    FlowOnlineDPO,
    Forgetting,
    NoisyDenoising,
    copies_of,
)
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.times import Times, sampled_times
from areno_fn.steps.recipes import Materials, build
from areno_fn.steps.recipes.flow_coupled import noisy_steps
from areno_fn.steps.recipes.flow_groups import parts
from areno_fn.steps.recipes.flow_levels import noisy_candidates
from areno_fn.testing import laws

NOISY, PLAIN = NoisyDenoising(steps=3, level=0.6), Denoising(steps=2)
CRD = FlowCRD(samples=4, denoising=PLAIN, reference_guidance=2.0)
REWARDED = [
    FlowGRPO(samples=4, denoising=NOISY),
    FlowGRPOGuard(samples=4, denoising=NOISY, guard_step_reweight=True, kl_coef=0.1),
    FlowDPPO(samples=4, denoising=NOISY, kl_coef=0.1),
    FlowNFT(samples=4, denoising=PLAIN, old=Forgetting(), times="grid", until=0.5),
    FlowAWM(samples=4, denoising=PLAIN),
    FlowDGPO(samples=4, denoising=PLAIN, kl_coef=0.1),
    CRD,
    FlowOnlineDPO(samples=4, denoising=PLAIN),
]


def named(specs: list[Any]) -> list[Any]:
    return [pytest.param(spec, id=type(spec).__name__) for spec in specs]


def moved(state: af.TrainState, after: af.TrainState) -> float:
    pairs = zip(tree.leaves(state.params), tree.leaves(after.params), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def scale(values: torch.Tensor) -> torch.Tensor:
    """Group-relative advantages of rewards [G, K], flattened."""
    return ((values - values.mean(1, keepdim=True)) / values.std(1, correction=0, keepdim=True)).flatten()


@pytest.mark.parametrize("spec", named(REWARDED))
def test_a_step_is_a_function_of_its_arguments(spec: Any) -> None:
    algorithm = made(spec, af.adamw(AdamWSpec(lr=1e-2), 10))
    state = state_of(algorithm)
    laws.step_is_pure(algorithm.step, state, judged(algorithm, state), moves=("actor",), renews=tuple(copies_of(spec)))


# ------------------------------------------------------------------------------------ zero states (2.18)


@pytest.mark.parametrize("reweight", [False, True])
def test_guard_begins_with_a_ratio_of_1_and_counts_steps_by_their_length(reweight: bool) -> None:
    algorithm = made(FlowGRPOGuard(samples=4, denoising=NOISY, guard_step_reweight=reweight))
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    after, metrics = algorithm.step(state, batch)
    assert metrics["train/ratio_max"] == metrics["train/ratio_mean"] == 1
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params["actor"])
    drawn, advantages, total = batch.rollout, scale(batch.rewards.reshape(3, 4)), torch.zeros(())
    for step, (sigma, nxt) in enumerate([(1.0, 2 / 3), (2 / 3, 1 / 3)]):
        x, taken, dt = drawn.state(step), drawn.state(step + 1), nxt - sigma
        g = 0.6 * math.sqrt(sigma / (1 - (2 / 3 if sigma == 1 else sigma)))
        v = POLICY.velocity(params, x, torch.full((12,), 1000 * sigma), drawn.conditions.positive)
        mean = x + (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
        std = g * math.sqrt(-dt)
        logp = torch.distributions.Normal(mean, std).log_prob(taken).mean((1, 2, 3))
        total = total - (advantages * logp).sum() * std / (-dt if reweight else 1)  # the gradient of exp(std * logp)
    (total / 24).backward()
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-5, rtol=1e-3, msg=path)


def test_dppo_without_a_move_keeps_every_step_and_is_the_policy_gradient() -> None:
    first = made(FlowDPPO(samples=4, denoising=NOISY))
    state = state_of(first)
    batch = judged(first, state)
    after, metrics = first.step(state, batch)
    assert metrics["flow/kept_fraction"] == metrics["train/ratio_max"] == 1
    plain, _ = made(FlowGRPO(samples=4, denoising=NOISY)).step(state, batch)
    assert moved(after, plain) < 1e-7 < moved(state, after)
    several = made(FlowDPPO(samples=4, denoising=NOISY, threshold=0.0, epochs=3))
    assert several.step(state_of(several), batch)[1]["flow/kept_fraction"] < 1


@pytest.mark.parametrize("scheme", ["online", "offline"])
def test_a_preference_begins_at_log_2_with_a_quarter_of_beta_of_the_errors(scheme: str) -> None:
    """The gradient (beta / 4) grad (e_w - e_l) of the mean over pairs, each arm with its own condition."""
    beta = 0.8
    if scheme == "online":
        algorithm = made(FlowOnlineDPO(samples=4, denoising=PLAIN, beta=beta, times="uniform", until=1.0))
        state = state_of(algorithm)
        batch: Any = judged(algorithm, state)
        rewards, drawn = batch.rewards.reshape(3, 4), batch.rollout
        rows = torch.stack([rewards.argmax(1), rewards.argmin(1)], 1) + 4 * torch.arange(3)[:, None]
        latents, labels, names = drawn.final[rows], drawn.conditions.positive[rows], drawn.groups[rows[:, 0]]
    else:
        algorithm = made(FlowDPO(beta=beta, times="uniform"))
        state = state_of(algorithm)
        names, labels = torch.tensor([7, 3, 9]), torch.tensor([[0, 2], [1, 1], [2, 0]])
        ids = torch.stack([2 * names, 2 * names + 1], 1).flatten()
        latents = clean(6).latents.reshape(3, 2, 1, 4, 4)
        conditions = Conditions(positive=labels.flatten(), negative=torch.full((6,), 3))
        batch = Clean(latents=latents.flatten(0, 1), prompts=FlowPrompts(conditions=conditions, ids=ids))
    after, metrics = algorithm.step(state, batch)
    assert metrics["train/loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert metrics["dpo/accuracy"] == metrics["dpo/margin"] == metrics["flow/kl"] == 0
    key = KEY.fold("levels").fold(0).fold(0)
    sigma = sampled_times(Times(), key.fold("level"), names)
    noise = latent_noise(key.fold("noise"), names, (1, 4, 4))
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params["actor"])
    errors = []
    for arm in (0, 1):
        share = sigma.reshape(-1, 1, 1, 1)
        x = (1 - share) * latents[:, arm] + share * noise
        v = POLICY.velocity(params, x, 1000 * sigma, labels[:, arm])
        errors.append((v - (noise - latents[:, arm])).square().mean((1, 2, 3)))
    loss = -F.logsigmoid(-beta / 2 * ((errors[0] - errors[0].detach()) - (errors[1] - errors[1].detach()))).mean()
    loss.backward()
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-6, rtol=1e-3, msg=path)


def test_groups_of_equal_rewards_make_no_pair_and_no_update() -> None:
    algorithm = made(FlowOnlineDPO(samples=4, denoising=PLAIN, minibatches=3))
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    after, metrics = algorithm.step(state, replace(batch, rewards=torch.ones(12)))
    assert moved(state, after) == 0 and "train/loss" not in metrics
    assert (after.counters.optimizer_step, after.counters.rollout_iteration) == (0, 1)
    some = torch.cat([torch.ones(4), batch.rewards[4:]])
    after, _ = algorithm.step(state, replace(batch, rewards=some))
    assert after.counters.optimizer_step == 2, "one pair an update, as far as there are pairs"


def test_dgpo_begins_with_weights_of_a_half() -> None:
    """1/2 A grad d, with one noise and one level for a group, the same noise at both of its levels."""
    algorithm = made(FlowDGPO(samples=4, denoising=PLAIN, until=1.0))
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    after, metrics = algorithm.step(state, batch)
    assert metrics["flow/group_weight"] == 0.5 and metrics["flow/kl"] == 0
    drawn, advantages = batch.rollout, scale(batch.rewards.reshape(3, 4))
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params["actor"])
    key, total = KEY.fold("levels").fold(0), torch.zeros(())
    noise = latent_noise(key.fold("noise"), drawn.groups, (1, 4, 4))
    for term in range(2):
        sigma = sampled_times(Times(), key.fold(term).fold("level"), drawn.groups)
        share = sigma.reshape(-1, 1, 1, 1)
        x = (1 - share) * drawn.final + share * noise
        v = POLICY.velocity(params, x, 1000 * sigma, drawn.conditions.positive)
        total = total + (0.5 * advantages * (v - (noise - drawn.final)).square().mean((1, 2, 3))).mean()
    (total / 2).backward()
    for (path, before), now in zip(tree.leaves_with_path(params), tree.leaves(after.params["actor"]), strict=True):
        expected = before.detach() - 0.1 * (torch.zeros_like(before) if before.grad is None else before.grad)
        torch.testing.assert_close(now, expected, atol=1e-6, rtol=1e-3, msg=path)


def test_crd_begins_with_no_implicit_reward_and_a_led_reference() -> None:
    algorithm = made(CRD)
    state = state_of(algorithm)
    batch = judged(algorithm, state)
    _, metrics = algorithm.step(state, batch)
    assert metrics["flow/reward"] == 0
    assert metrics["flow/kl"] > 1e-4, "the reference is led by guidance, so that even the start is away from it"
    plain = made(FlowCRD(samples=4, denoising=PLAIN, kl_coef=0.0))
    state = state_of(plain)
    _, metrics = plain.step(state, batch)
    share = 0.5 + scale(batch.rewards.reshape(3, 4)).reshape(3, 4) / 10
    expected = 5 * (share - share.mean(1, keepdim=True)).square().mean()  # max_advantage / beta
    assert metrics["train/loss"] == pytest.approx(float(expected), rel=1e-5)


# ------------------------------------------------------------------------------------ copies


def params_of(state: af.TrainState) -> list[torch.Tensor]:
    return tree.leaves(state.params["actor"])


@pytest.mark.parametrize("spec", named([FlowNFT(samples=4, denoising=PLAIN, old=Forgetting(rate=0.2, cap=0.3)), CRD]))
def test_copies_follow_after_every_iteration(spec: Any) -> None:
    """s <- d s + (1 - d) p with d = min(cap, start + rate (optimizer steps - flat)), written out."""
    algorithm = made(msgspec.structs.replace(spec, minibatches=2), af.adamw(AdamWSpec(lr=1e-2), 10))
    state = replace(state_of(algorithm), counters=af.Counters())
    copies = {"old": spec.old} | ({"sampler": spec.sampler} if isinstance(spec, FlowCRD) else {})
    expected = {name: [leaf.clone() for leaf in params_of(state)] for name in copies}
    for iteration in range(3):
        state, _ = algorithm.step(state, judged(algorithm, state))
        made_so_far = 2 * (iteration + 1)
        for name, rule in copies.items():
            d = 0.0 if made_so_far < rule.flat else min(rule.cap, rule.start + rule.rate * (made_so_far - rule.flat))
            expected[name] = [d * s + (1 - d) * p for s, p in zip(expected[name], params_of(state), strict=True)]
            for own, other in zip(tree.leaves(state.snapshots[name]), expected[name], strict=True):
                torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-5)


def test_the_copy_draws_and_is_what_nft_pushes_away_from() -> None:
    spec = FlowNFT(samples=4, denoising=PLAIN, old=Forgetting(start=0.9, cap=0.9, rate=0.0))
    algorithm = made(spec, af.adamw(AdamWSpec(lr=1e-2), 10))
    state, _ = algorithm.step(state_of(algorithm), judged(algorithm, state_of(algorithm)))
    assert algorithm.sample is not None
    drawn = algorithm.sample(state, prompts(3)).final
    other = made(FlowNFT(samples=4, denoising=PLAIN))
    assert other.sample is not None
    swapped = replace(state, params={"actor": state.snapshots["old"]})
    torch.testing.assert_close(drawn, other.sample(swapped, prompts(3)).final, atol=1e-6, rtol=0)
    assert not torch.allclose(drawn, other.sample(state, prompts(3)).final, atol=1e-3)


def test_dgpo_draws_with_the_copy_after_so_many_updates() -> None:
    spec = FlowDGPO(samples=4, denoising=PLAIN, draw_old=2, old=Forgetting(start=0.8, cap=0.8, rate=0.0))
    algorithm = made(spec, af.adamw(AdamWSpec(lr=1e-2), 10))
    assert algorithm.sample is not None
    state = state_of(algorithm)
    for updates in range(3):
        drawn = algorithm.sample(state, prompts(3)).final
        who = state.snapshots["old"] if updates >= 2 else state.params["actor"]
        alone = replace(state, params={"actor": who}, controls={"copies_began": state.counters.optimizer_step})
        torch.testing.assert_close(drawn, algorithm.sample(alone, prompts(3)).final, atol=1e-6, rtol=0)
        state, _ = algorithm.step(state, judged(algorithm, state))


def test_the_average_draws_and_what_it_drew_is_what_ratios_compare_with() -> None:
    spec = FlowGRPO(samples=4, denoising=NOISY, draw_with="ema")
    ema = EMA(decay=0.9, schedule="constant")
    materials = Materials(policy=POLICY, optimizers={"actor": af.adamw(AdamWSpec(lr=1e-2), 10)}, ema=ema)
    algorithm = build(spec, materials)
    state = state_of(algorithm)
    state, metrics = algorithm.step(state, judged(algorithm, state))
    assert metrics["train/ratio_max"] == 1, "the average begins as the actor"
    assert algorithm.sample is not None
    drawn = algorithm.sample(state, prompts(3))
    swapped = replace(state, params={"actor": state.snapshots["ema"]})
    plain = made(FlowGRPO(samples=4, denoising=NOISY))
    assert plain.sample is not None
    torch.testing.assert_close(drawn.logp, plain.sample(swapped, prompts(3)).logp, atol=1e-5, rtol=0)
    _, metrics = algorithm.step(state, judged(algorithm, state))
    assert metrics["train/ratio_max"] > 1.0001


# ------------------------------------------------------------------------------------ steps, parts, several rewards


def test_noisy_steps_are_a_function_of_the_iteration() -> None:
    spec = NoisyDenoising(steps=9, count=3)
    schedule = flow_match(9)
    among = noisy_candidates(spec, schedule, EVEN)
    found = [noisy_steps(spec, among, KEY.fold(i)) for i in range(60)]
    assert found == [noisy_steps(spec, among, KEY.fold(i)) for i in range(60)]
    assert {len(set(steps)) for steps in found} == {3} and {s for steps in found for s in steps} == set(range(8))
    window = NoisyDenoising(steps=9, count=3, window=True, noisy=[2, 3, 4, 5])
    among = noisy_candidates(window, schedule, EVEN)
    assert {noisy_steps(window, among, KEY.fold(i)) for i in range(30)} == {(2, 3, 4), (3, 4, 5)}
    named, usual = NoisyDenoising(steps=9, noisy=[-2, 0, 4, 4]), NoisyDenoising(steps=9)
    assert noisy_steps(named, noisy_candidates(named, schedule, EVEN), KEY) == (0, 4, 7)
    assert noisy_steps(usual, noisy_candidates(usual, schedule, EVEN), KEY) == tuple(range(8))


def test_only_the_noisy_steps_of_an_iteration_are_stored_and_trained_on() -> None:
    algorithm = made(FlowGRPO(samples=4, denoising=NoisyDenoising(steps=6, level=0.6, count=2)))
    state, seen = state_of(algorithm), set()
    for _ in range(6):
        batch = judged(algorithm, state)
        drawn = batch.rollout
        noisy = [step for step, place in enumerate(drawn.transition_map) if place >= 0]
        assert noisy == [step for step, level in enumerate(drawn.levels.tolist()) if level] and len(noisy) == 2
        stored = [i for i, place in enumerate(drawn.state_map) if place >= 0]
        assert stored == sorted({i for step in noisy for i in (step, step + 1)})
        seen.add(tuple(noisy))
        state, metrics = algorithm.step(state, batch)
        assert metrics["flow/steps"] == 12 * 2 and metrics["train/ratio_max"] == 1
    assert len(seen) > 2


@pytest.mark.parametrize("spec", named([*REWARDED, FlowDPO(terms=2)]))
def test_R9_micro_batches_of_rows_change_no_gradient(spec: Any) -> None:
    """One update of the whole batch, and in micro-batches of at most 5 rows: the same gradient to 1e-6."""
    gradients = []
    for most in (0, 5):
        algorithm = build(spec, Materials(policy=POLICY, optimizers={"actor": af.sgd(MOVED, 9)}, micro_rows=most))
        state = state_of(algorithm)
        batch = pairs() if isinstance(spec, FlowDPO) else judged(algorithm, state)
        after, metrics = algorithm.step(state, batch)
        assert after.counters.optimizer_step == 1
        both = zip(params_of(state), params_of(after), strict=True)
        gradients.append((torch.cat([((a - b) / 0.1).flatten() for a, b in both]), metrics["train/loss"]))
    (whole, loss), (cut, other) = gradients
    assert float((whole - cut).abs().max()) <= 1e-6 * max(1.0, float(whole.abs().max()))
    assert other == pytest.approx(loss, rel=1e-5, abs=1e-7)


def pairs() -> Clean:
    ids = torch.arange(12) + 20
    conditions = Conditions(positive=torch.arange(12) % 3)
    return Clean(latents=clean(12).latents, prompts=FlowPrompts(conditions=conditions, ids=ids))


def test_parts_tear_no_unit_apart() -> None:
    units = torch.tensor([4, 4, 4, 1, 1, 9, 9, 9, 9, 4])
    assert [part.tolist() for part in parts(units, 5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [part.tolist() for part in parts(units, 3)] == [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]]
    assert [len(part) for part in parts(units, 0)] == [10]


@pytest.mark.parametrize(
    "spec", named([FlowDGPO(samples=4, denoising=PLAIN, minibatches=3), msgspec.structs.replace(CRD, minibatches=2)])
)
def test_mini_batches_are_of_whole_groups(spec: Any) -> None:
    seen: list[torch.Tensor] = []

    def loss(found: Velocities) -> af.Sums:
        seen.append(found.batch.groups)
        total = found.velocity.square().mean()
        return af.Sums(total=total, weight=total.new_tensor(1.0), stats={}, peaks={})

    algorithm = made(spec, loss=loss)
    state = state_of(algorithm)
    algorithm.step(state, judged(algorithm, state))
    for groups in seen:
        assert set(torch.unique(groups, return_counts=True)[1].tolist()) == {4}
    assert sorted(set(torch.cat(seen).tolist())) == [10, 11, 12]


def test_several_rewards_are_added_or_compared_one_by_one() -> None:
    """GDPO by numpy: a reward of a thousand times the scale outweighs the other in a sum, and not one by one."""
    found: list[torch.Tensor] = []

    def loss(moves: Moves) -> af.Sums:
        found.append(moves.batch.advantage[moves.batch.segments.argsort()])
        total = moves.now.velocity.square().mean()
        return af.Sums(total=total, weight=total.new_tensor(1.0), stats={}, peaks={})

    values = torch.stack(
        [af.random.normal(KEY, torch.arange(8)), 1000 * af.random.normal(KEY.fold(1), torch.arange(8))], 1
    )
    weights = torch.tensor([1.0, 0.5])
    for combine in ("sum", "each"):
        spec = FlowGRPO(samples=4, denoising=NoisyDenoising(steps=2), combine=combine)
        algorithm = made(spec, loss=loss)
        state = state_of(algorithm)
        assert algorithm.sample is not None
        drawn = algorithm.sample(state, prompts(2))
        each = EachReward(values=values, weights=weights, applies=torch.ones(8, 2, dtype=torch.bool))
        algorithm.step(state, JudgedTrajectory(rollout=drawn, rewards=values @ weights, each=each))
    order = af.random.permutation(KEY.fold("minibatches").fold(0).fold(0), 8)
    r = values.double().numpy().reshape(2, 4, 2)
    shares = (r - r.mean(1, keepdims=True)) / r.std(1, keepdims=True)
    total = (shares * np.array([1.0, 0.5])).sum(-1).reshape(-1)
    one_by_one = (total - total.mean()) / total.std()
    np.testing.assert_allclose(found[1].numpy(), one_by_one[order.numpy()], atol=1e-5)
    summed = r @ np.array([1.0, 0.5])
    plain = ((summed - summed.mean(1, keepdims=True)) / summed.std(1, keepdims=True)).reshape(-1)
    np.testing.assert_allclose(found[0].numpy(), plain[order.numpy()], atol=1e-5)
    assert abs(one_by_one - plain).max() > 0.1


def test_advantages_are_clipped() -> None:
    spec = FlowGRPO(samples=4, denoising=NOISY, max_advantage=0.5)
    algorithm = made(spec)
    state = state_of(algorithm)
    _, metrics = algorithm.step(state, judged(algorithm, state))
    assert metrics["rollout/advantage_std"] <= 0.5
