"""PPO: what a step makes of a rollout, against loops in float64, and what each turn leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_policy import Attention

from areno_fn import tree
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.batch import Experience, JudgedRollout, Prompts
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import PPO, AdamWSpec, Critic, Sampling
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.contracts.valued import Valued
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.optimizers.adamw import adamw
from areno_fn.steps.recipes import ACTOR, CRITIC, REFERENCE, Algorithm, Materials, build
from areno_fn.steps.recipes.ppo import ITERATIONS, KL_SCALE
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.value import estimate, values_of
from areno_fn.steps.turns import Turn, in_turns

POLICY = Attention()
SAMPLING = Sampling(max_tokens=6, temperature=0.9)


def begun(spec: PPO, loss: Any = None) -> tuple[Algorithm, TrainState]:
    """An algorithm, and a state whose actor and critic have moved since the phase began."""
    optimizers = {role: adamw(AdamWSpec(role=role, lr=1e-2), 10) for role in (ACTOR, CRITIC)}
    materials = Materials(policy=POLICY, optimizers=optimizers, stop=(0,), micro_tokens=40)
    algorithm = build(spec, materials, loss)
    critic = Valued(trunk=POLICY.init(7), head=torch.linspace(-1, 1, POLICY.width)[None])
    state = TrainState(
        params={ACTOR: POLICY.init(), CRITIC: critic},
        optim={},
        snapshots={},
        counters=Counters(),
        key=Key.of(3),
        cursor=Cursor(),
    )
    state = algorithm.begin(state)
    moved = {**state.params, ACTOR: tree.map(lambda x: x * 1.2, state.params[ACTOR])}
    return algorithm, replace(state, params=moved)


def judged(algorithm: Algorithm, state: TrainState) -> JudgedRollout:
    assert algorithm.sample is not None
    tokens = torch.tensor([[3, 4, 5], [6, 7, 1], [2, 9, 1]])
    rollout = algorithm.sample(state, Prompts(tokens=tokens, lengths=torch.tensor([3, 2, 2]), ids=torch.arange(3)))
    return JudgedRollout(rollout=rollout, rewards=(rollout.tokens % 5).sum(1).float())


def plain_logp(params: Any, tokens: list[int], start: int) -> list[float]:
    """Log-probabilities of the tokens from `start` on, one document at a time."""
    x = torch.tensor(tokens)
    hidden = POLICY.hidden(params, x, torch.arange(len(tokens)), torch.zeros(len(tokens), dtype=torch.int64))
    logp = (POLICY.logits(params, hidden) / SAMPLING.temperature).log_softmax(-1)
    return [float(logp[place - 1, tokens[place]]) for place in range(start, len(tokens))]


def plain_values(params: Valued, tokens: list[int], start: int) -> list[float]:
    """What the critic says before each of the tokens from `start` on."""
    x = torch.tensor(tokens)
    hidden = POLICY.hidden(params.trunk, x, torch.arange(len(tokens)), torch.zeros(len(tokens), dtype=torch.int64))
    said = hidden @ params.head[0]
    return [float(said[place - 1]) for place in range(start, len(tokens))]


def plain_advantages(spec: PPO, state: TrainState, batch: JudgedRollout) -> tuple[list[list[float]], ...]:
    """Values, returns and advantages of every completion, by the definitions: A_t is the sum of (gamma lam)^k delta."""
    rollout = batch.rollout
    values, returns, advantages = [], [], []
    for row in range(rollout.lengths.shape[0]):
        length, prompt = int(rollout.lengths[row]), int(rollout.prompts.lengths[row])
        document = rollout.prompts.tokens[row, :prompt].tolist() + rollout.tokens[row, :length].tolist()
        value = plain_values(state.params[CRITIC], document, prompt)
        reference = plain_logp(state.snapshots[REFERENCE], document, prompt)
        drawn = plain_logp(state.params[ACTOR], document, prompt)
        reward = [-spec.kl_coef * (a - b) for a, b in zip(drawn, reference, strict=True)]
        reward[-1] += float(batch.rewards[row])
        after = [*value[1:], 0.0]
        delta = [r + spec.gamma * n - v for r, n, v in zip(reward, after, value, strict=True)]
        found = [
            sum((spec.gamma * spec.lam) ** k * d for k, d in enumerate(delta[start:])) for start in range(len(delta))
        ]
        values.append(value)
        advantages.append(found)
        returns.append([a + v for a, v in zip(found, value, strict=True)])
    return values, returns, advantages


@pytest.mark.parametrize("whiten", [True, False])
def test_every_token_gets_the_advantage_of_the_definition(whiten: bool) -> None:
    spec = PPO(samples=2, sampling=SAMPLING, kl_coef=0.3, gamma=0.97, lam=0.9, whiten=whiten)
    seen: list[Actions] = []

    def noting(actions: Actions) -> Sums:
        seen.append(actions)
        return clipped()(actions)

    algorithm, state = begun(spec, noting)
    batch = judged(algorithm, state)
    algorithm.step(state, batch)
    _, _, expected = plain_advantages(spec, state, batch)
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    if whiten:
        flat = (flat - flat.mean()) / flat.std(correction=0)
    received = torch.cat([actions.advantage for actions in seen])
    assert torch.allclose(received.double().sort().values, flat.sort().values, atol=1e-5)
    recorded = torch.cat([actions.old for actions in seen])
    assert torch.allclose(recorded.sort().values, batch.rollout.logp[batch.rollout.logp != 0].sort().values)


def test_the_first_loss_of_the_critic_is_that_of_the_definition() -> None:
    spec = PPO(samples=2, sampling=SAMPLING, kl_coef=0.3, gamma=0.97, lam=0.9, critic=Critic(coef=0.7))
    algorithm, state = begun(spec)
    batch = judged(algorithm, state)
    _, metrics = algorithm.step(state, batch)
    values, returns, _ = plain_advantages(spec, state, batch)
    v = torch.tensor([x for row in values for x in row], dtype=torch.float64)
    r = torch.tensor([x for row in returns for x in row], dtype=torch.float64)
    assert metrics["critic/loss"] == pytest.approx(float(0.5 * 0.7 * (v - r).square().mean()), rel=1e-5)
    explained = 1 - (r - v).var(correction=0) / r.var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), rel=1e-4)


def test_S3_the_turn_of_a_role_leaves_every_other_role_as_it_is() -> None:
    spec = PPO(samples=2, sampling=SAMPLING, kl_coef=0.1, critic=Critic(updates=2, warmup=1))
    algorithm, state = begun(spec)
    after, metrics = algorithm.step(state, judged(algorithm, state))
    assert tree.first_difference(after.params[ACTOR], state.params[ACTOR]) is None, "warm-up moves the critic alone"
    assert tree.first_difference(after.optim[ACTOR], state.optim[ACTOR]) is None
    assert tree.first_difference(after.snapshots, state.snapshots) is None
    assert tree.first_difference(after.params[CRITIC], state.params[CRITIC]) is not None
    assert "train/loss" not in metrics and after.counters.optimizer_step == 2
    assert after.controls[ITERATIONS] == 1

    later, metrics = algorithm.step(after, judged(algorithm, after))
    assert tree.first_difference(later.params[ACTOR], after.params[ACTOR]) is not None
    assert tree.first_difference(later.snapshots, state.snapshots) is None
    assert "train/loss" in metrics and later.counters.optimizer_step == 5


def test_the_critic_begins_a_phase_as_it_is_told() -> None:
    optimizers = {role: adamw(AdamWSpec(role=role), 10) for role in (ACTOR, CRITIC)}

    def fresh(params: Any) -> Valued:
        return Valued(trunk=tree.map(torch.clone, params[ACTOR]), head=torch.zeros(1, POLICY.width))

    materials = Materials(policy=POLICY, optimizers=optimizers, stop=(0,), begin_critic=fresh)
    state = begun(PPO())[1]
    started = build(PPO(), materials).begin(state)
    assert tree.first_difference(started.params[CRITIC].trunk, state.params[ACTOR]) is None
    assert not started.params[CRITIC].head.any()


@pytest.mark.parametrize(("target", "times"), [(1e-6, 1 + 0.2 * 6 / 100), (1e6, 1 - 0.2 * 6 / 100), (0.0, 1.0)])
def test_the_coefficient_of_the_kl_follows_what_was_measured(target: float, times: float) -> None:
    spec = PPO(samples=2, sampling=SAMPLING, kl_coef=0.5, kl_target=target, kl_horizon=100, kl_estimator="k2")
    algorithm, state = begun(spec)
    after, metrics = algorithm.step(state, judged(algorithm, state))
    assert after.controls[KL_SCALE] == pytest.approx(times)
    assert metrics["rollout/kl_coef"] == 0.5 and metrics["rollout/kl"] > 0


def test_the_coefficient_stands_while_the_critic_is_trained_alone() -> None:
    spec = PPO(samples=2, sampling=SAMPLING, kl_coef=0.5, kl_target=1.0, critic=Critic(warmup=1))
    algorithm, state = begun(spec)
    after, _ = algorithm.step(state, judged(algorithm, state))
    assert after.controls[KL_SCALE] == 1.0
    later, _ = algorithm.step(after, judged(algorithm, after))
    assert later.controls[KL_SCALE] != 1.0


def test_another_coefficient_and_another_warm_up_hold_from_the_next_step_on() -> None:
    algorithm, state = begun(PPO(samples=2, sampling=SAMPLING, kl_coef=0.5, kl_target=1e-6, kl_horizon=100))
    after, _ = algorithm.step(state, judged(algorithm, state))
    other, _ = begun(PPO(samples=2, sampling=SAMPLING, kl_coef=0.25, critic=Critic(warmup=2)))
    _, metrics = other.step(after, judged(other, after))
    assert metrics["rollout/kl_coef"] == pytest.approx(0.25 * (1 + 0.2 * 6 / 100))
    assert "train/loss" not in metrics, "one iteration of two is done"


def test_what_an_optimizer_kept_of_another_critic_is_nothing_of_the_next() -> None:
    half = tree.map(lambda leaf: leaf.bfloat16(), POLICY.init())
    optimizers = {role: adamw(AdamWSpec(role=role, lr=1e-4), 10) for role in (ACTOR, CRITIC)}

    def fresh(params: Any) -> Valued:
        head = torch.zeros(1, POLICY.width, dtype=torch.bfloat16)
        return Valued(trunk=tree.map(torch.clone, params[ACTOR]), head=head)

    algorithm = build(PPO(), Materials(policy=POLICY, optimizers=optimizers, stop=(0,), begin_critic=fresh))
    empty = {"optim": {}, "snapshots": {}, "counters": Counters(), "key": Key.of(3), "cursor": Cursor()}
    params = {ACTOR: half}
    first = algorithm.begin(TrainState(params={**params, CRITIC: fresh(params)}, **empty))
    masters = first.optim[CRITIC].master

    def drifted(kept: Any) -> Any:
        return replace(kept, master={path: leaf * (1 + 1e-4) for path, leaf in kept.master.items()})

    again = algorithm.begin(replace(first, optim={role: drifted(kept) for role, kept in first.optim.items()}))
    assert tree.equal(again.optim[CRITIC].master, masters)
    assert not tree.equal(again.optim[ACTOR].master, first.optim[ACTOR].master), "the actor goes on"


def test_completions_that_were_cut_off_do_not_count_in_the_whitening() -> None:
    seen: list[Actions] = []

    def noting(actions: Actions) -> Sums:
        seen.append(actions)
        return clipped()(actions)

    algorithm, state = begun(PPO(samples=4, sampling=SAMPLING, mask_truncated=True), noting)
    batch = judged(algorithm, state)
    assert batch.rollout.finished.any() and not batch.rollout.finished.all()
    _, metrics = algorithm.step(state, batch)
    counted = torch.cat([actions.advantage[actions.weight > 0] for actions in seen]).double()
    assert float(counted.mean()) == pytest.approx(0, abs=1e-6)
    assert float(counted.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert metrics["train/tokens"] == metrics["critic/tokens"] == len(counted)


def test_the_value_of_a_decision_is_said_before_its_token_is_known() -> None:
    critic = Valued(trunk=POLICY.init(7), head=torch.linspace(-1, 1, POLICY.width)[None])
    algorithm, state = begun(PPO(samples=2, sampling=SAMPLING))
    rollout = judged(algorithm, state).rollout
    zeros = torch.zeros_like(rollout.logp)
    (one,) = experience(rollout, zeros, micro_tokens=1000, values=zeros, returns=zeros)
    expected = []
    for row in range(rollout.lengths.shape[0]):
        length, prompt = int(rollout.lengths[row]), int(rollout.prompts.lengths[row])
        document = rollout.prompts.tokens[row, :prompt].tolist() + rollout.tokens[row, :length].tolist()
        expected += plain_values(critic, document, prompt)
    said = values_of(POLICY)(critic, one.packed)
    assert torch.allclose(said.sort().values, torch.tensor(expected).sort().values, atol=1e-5)
    assert torch.equal(estimate(POLICY)(critic, one).value, said)


def test_values_are_missing_in_one_sentence() -> None:
    algorithm, state = begun(PPO(samples=2, sampling=SAMPLING))
    rollout = judged(algorithm, state).rollout
    (one,) = experience(rollout, torch.zeros_like(rollout.logp), micro_tokens=1000)
    assert isinstance(one, Experience)
    with pytest.raises(RecordError, match="estimate needs an Experience with values and returns"):
        estimate(POLICY)(state.params[CRITIC], one)


def test_rows_that_a_rollout_has_not_are_refused_in_one_sentence() -> None:
    algorithm, state = begun(PPO(samples=2, sampling=SAMPLING))
    rollout = judged(algorithm, state).rollout
    count, nothing = rollout.lengths.shape[0], torch.zeros_like(rollout.logp)
    last = experience(rollout, nothing, micro_tokens=1000, rows=torch.tensor([count - 1]))
    assert tree.equal(experience(rollout, nothing, micro_tokens=1000, rows=torch.tensor([-1])), last)
    for row in (count, -count - 1):
        with pytest.raises(
            RecordError, match=f"^rows names row {row}, but the rollout has {count} rows, numbered from 0$"
        ):
            experience(rollout, nothing, micro_tokens=1000, rows=torch.tensor([0, row]))


def test_turns_are_made_in_order_and_combined() -> None:
    def counting(name: str) -> Any:
        def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, float]]:
            count = int(state.controls.get("turns", 0)) + 1
            return replace(state, controls={"turns": count}), {f"{name}/at": float(count), f"{name}/last_max": count}

        return update

    state = begun(PPO())[1]
    after, metrics = in_turns(Turn(counting("critic"), 3), Turn(counting("train")))(replace(state, controls={}), None)
    assert after.controls == {"turns": 4}
    assert metrics == {"critic/at": 2.0, "critic/last_max": 3, "train/at": 4.0, "train/last_max": 4}
    with pytest.raises(RecordError, match="two turns report 'critic/at'"):
        in_turns(Turn(counting("critic")), Turn(counting("critic")))(state, None)
    with pytest.raises(SpecError, match="at least once, received repeats=0"):
        Turn(counting("critic"), 0)
